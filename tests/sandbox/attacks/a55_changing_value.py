# A list subclass and a dict that change while they are encoded, and an answer that holds itself.
asked = 0


class Growing(list):
    def __iter__(self):
        self.append(49)
        return list.__iter__(self)


def solve(n):
    global asked
    asked += 1
    knot = [49]
    knot.append(knot)
    return (Growing([49]), knot, {"a": knot}, (knot,))[asked % 4]
