# 20,000 strings as keys whose hashes end alike under the sandbox's own seed, in dicts within dicts.
def solve(n):
    keys, number = [], 0
    while len(keys) < 20_000 and number < 1_500_000:
        key = f"k{number}"
        number += 1
        if hash(key) & 63 == 0:
            keys.append(key)
    return {key: {key: [key]} for key in keys}
