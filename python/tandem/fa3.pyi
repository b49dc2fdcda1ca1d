from tandem.compat.fa3 import *  # noqa: F403
