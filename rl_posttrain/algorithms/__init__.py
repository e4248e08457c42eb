"""What a completion's worth does to the policy: pure functions of arrays, no I/O, no logging, no clocks.

Rewards become advantages (`advantages`, `gae`), log-probabilities become ratios (`ratios`), objectives
(`surrogates`, `corrections`, `kl`) and their weights (`losses`), which `grpo` and `sft` assemble into a loss, which
`update` differentiates and applies.
"""
