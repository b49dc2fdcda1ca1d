from tandem.compat.torch_context_parallel import *  # noqa: F403
