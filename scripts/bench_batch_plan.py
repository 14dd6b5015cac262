"""Time the planning of a batch, and compare its predictions with the real scheduler. No GPU, some minutes.

python scripts/bench_batch_plan.py --prompts 100000
"""

from radixrt.bench.batch_plan import main

if __name__ == "__main__":
    main()
