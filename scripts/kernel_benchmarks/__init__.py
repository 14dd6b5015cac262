r"""Cases of kernels, which scripts\/bench_kernels.py measures and tests compile; and how they are measured."""
