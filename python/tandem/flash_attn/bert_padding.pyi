from tandem.compat.flash_attn.bert_padding import *  # noqa: F403
