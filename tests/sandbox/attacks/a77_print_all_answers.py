n = int(input())
print(*range(3000), sep="\n")
