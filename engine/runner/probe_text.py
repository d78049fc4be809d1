"""A text of several kinds, by which a model shows what its queries look for. 8-bit caches depend on every letter."""

PROBE_TEXT = """\
The harbour was quiet when Anna came down the steps. She had counted on rain, and rain there was, thin and cold, driven
in from the sea so that the lamps along the quay stood in rings of their own light. "You are late," said the old man in
the boat, without turning round. "The tide will not wait for either of us." She laughed, put her bag down between the
ropes and took the other oar. Nobody had told her how far it was; nobody, she thought, had told her anything at all.

Heat flows from a warm body to a cold one until both have the same temperature. The reverse never happens by itself,
although no law of mechanics forbids it: there are simply many more ways in which the energy can be spread out than ways
in which it can be gathered. In 1865 Rudolf Clausius called the measure of this spreading entropy.

# Installation

1. Download the archive (about 12.5 MB) and unpack it.
2. Run `./configure --prefix=/usr/local` and then `make -j4`.
3. Check the result:

```python
def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

print(median([3, 1, 4, 1, 5, 9, 2, 6]))  # 3.5
```

Question: A train leaves at 9:40 and arrives at 12:05. How long is the journey?
Answer: From 9:40 to 12:00 are 2 hours and 20 minutes, and 5 minutes more make 2 hours and 25 minutes.

{"name": "Lena", "age": 31, "languages": ["de", "fr"], "address": {"city": "Basel", "zip": "4051"}}

| city   | inhabitants | since |
| ------ | ----------: | ----- |
| Lisbon |     545,796 | 1255  |
| Prague |   1,357,326 | 1230  |

Der Zug nach Hamburg hat heute zwanzig Minuten Verspaetung. Le petit chat dort sous la table de la cuisine. La casa
donde vivimos es pequena, pero tiene un jardin muy bonito.

Dear Mr. Whitfield, thank you for your letter of 3 March. We regret that the parts which you ordered have not arrived;
our supplier in Ohio assures us that they were sent on the 21st. Should they not reach you by Friday, please call us and
we will send others free of charge. Yours sincerely, M. Okafor

It was then, between the second and the third bell, that Anna saw the light again, and this time the old man saw it too.
He stopped rowing. "That," he said slowly, "is not the lamp of any boat I know."
"""
