from tandem.compat.torch_sdpa import *  # noqa: F403
