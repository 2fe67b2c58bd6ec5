"""Photos, labels and benchmarks: where everything that is learned or measured comes from."""
