"""What work costs in the small workloads of tests: a workload's file without its profile."""

COSTS = """
[lengths]
median_tokens = 20.0
sigma = 0.5
[decoding]
step_s = 0.01
step_s_per_sequence = 0.001
[training]
s_per_token = 0.001
[syncing]
parameter_bytes = 1e6
gather_bytes_per_s = 1e8
send_bytes_per_s = 1e8
load_bytes_per_s = 1e8
"""
