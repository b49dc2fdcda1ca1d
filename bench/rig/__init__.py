"""Parts of the GPU programs in bench/: problems, peers, timing, judging, and launching kernels by themselves."""
