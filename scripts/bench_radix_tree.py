"""Time the radix tree: matching, inserting, evicting at 100,000 leaves. No options, no GPU, half a minute.

python scripts/bench_radix_tree.py
"""

from radixrt.bench.radix_tree import main

if __name__ == "__main__":
    main()
