from tandem.compat.sdpa import *  # noqa: F403
