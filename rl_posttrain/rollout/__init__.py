"""(2) What the policy says: sampling, jitted prefill and decode."""
