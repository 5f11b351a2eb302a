"""Scripts that benchmarks run as the trainers of a job."""
