from tandem.compat.flash_attn.layers.rotary import *  # noqa: F403
