"""Post-training of language models by reinforcement learning, in JAX.

The folder listing is the loop:

    tasks -> rollout -> sandbox -> rewards -> algorithms -> observability

Axes, in einsums and array signatures: B rows, T time, S keys, V vocab, D embed, L layers, N heads,
K kv heads, G queries per kv head (the samples of a group are `group_size`, never G), H head width,
F mlp, R lora rank.
"""
