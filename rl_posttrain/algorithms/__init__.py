"""What a completion's worth does to the policy: pure functions of arrays, no I/O, no logging, no clocks.

Rewards become advantages (`advantages`), log-probabilities become ratios (`ratios`) and objectives
(`losses`), which `grpo` and `sft` assemble into a loss, which `update` differentiates and applies.
"""
