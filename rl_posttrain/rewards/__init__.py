"""(4) What a completion is worth: verdicts of the domains' verifiers, and the reward made of them."""
