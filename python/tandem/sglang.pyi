from tandem.compat.sglang import *  # noqa: F403
