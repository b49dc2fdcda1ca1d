from tandem.compat.vllm import *  # noqa: F403
