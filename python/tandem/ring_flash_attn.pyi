from tandem.compat.ring_flash_attn import *  # noqa: F403
