from tandem.compat.fa4 import *  # noqa: F403
