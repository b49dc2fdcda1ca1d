from tandem.compat.flash_attn import *  # noqa: F403
