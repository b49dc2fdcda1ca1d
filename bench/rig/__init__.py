"""Parts of the GPU programs in bench/: problems, peers, timing, error checks, and direct launches of kernels."""
