"""Hits and time of a batch in the planned order and in that of its file, where the pool is small.

python scripts/bench_batch_order.py --config qwen3-0.6b --subjects 57
"""

from radixrt.bench.batch_order import main

if __name__ == "__main__":
    main()
