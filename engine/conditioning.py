"""A fixed text that has nothing to do with any prompt, for chunks to be computed behind (`warm` conditioning).

Its words end up in chunk keys by their token ids: with another text every chunk stored warm would be a miss.
"""

from __future__ import annotations

from kvblend.engine.prompt import chunk_ids
from kvblend.engine.tokenizer import Tokenizer

WARM_TOKENS_MAX = 900
PASSAGES: tuple[tuple[str, str], ...] = (
    (
        "Columnar basalt",
        "Columnar basalt forms when a thick lava flow cools and shrinks. The surface loses heat first, and because "
        "rock contracts as it cools, tension builds up until cracks open. Cracks that meet at angles near 120 degrees "
        "release the most stress for the least new surface, so a network of mostly six-sided figures appears. As "
        "cooling moves inward the cracks follow it, and long prisms are left standing at right angles to the surface "
        "that lost the heat. Slow cooling makes wide columns, sometimes two metres across; fast cooling makes thin "
        "ones. Five- and seven-sided columns are common too. Well-known examples lie on the coast of Northern "
        "Ireland, on an island off western Scotland, and in the gorges of Iceland and Armenia.",
    ),
    (
        "Double-entry bookkeeping",
        "In double-entry bookkeeping every transaction is written down twice, as a debit in one account and as a "
        "credit in another. If a shop buys flour for 40 coins, the stock account rises by 40 and the cash account "
        "falls by the same amount. Since both sides are always equal, the sum of all debits must match the sum of all "
        "credits, and a trial balance shows at once whether an entry was forgotten or copied wrongly. Merchants in "
        "the cities of northern Italy used the method by the fourteenth century, and a printed description of it "
        "appeared in Venice in 1494. It does not catch every mistake: an amount that is booked in the wrong account, "
        "but on both sides, leaves the totals in balance.",
    ),
    (
        "Weaver ants",
        "Weaver ants live in trees in the tropics of Africa, Asia and northern Australia. They build nests of living "
        "leaves. Rows of workers hold on to the edge of one leaf, grip the next one with their jaws and pull; when "
        "the gap is wide they form chains, each ant holding the waist of the one before it. Once the edges touch, "
        "other workers bring larvae that are about to pupate, and move them back and forth like shuttles while they "
        "give off silk. The silk glues the seam. A large colony may keep more than a hundred nests in a dozen trees. "
        "Citrus growers in southern China have used such ants against pests for at least sixteen centuries, tying "
        "bamboo strips between trees as bridges.",
    ),
    (
        "Canal locks",
        "A lock lifts boats from one level of a canal to another without pumps. It is a chamber with watertight gates "
        "at both ends. To go up, a boat enters at the lower level and the lower gates are closed behind it. Sluices "
        "in the upper gates are opened, water flows in by its own weight, and the boat rises until the surface inside "
        "is level with the upper reach; only then can the upper gates be swung open. Mitre gates meet in a shallow V "
        "that points upstream, so that the pressure of the water holds them shut. Every passage lets one chamber of "
        "water run downhill, which is why summit levels need reservoirs. Side ponds can save about half of it.",
    ),
    (
        "Sourdough",
        "Sourdough bread rises by a mixed culture of wild yeasts and lactic acid bacteria that lives in a paste of "
        "flour and water. The baker keeps part of it and feeds it regularly. Yeasts break down sugars and give off "
        "carbon dioxide, which is caught in the gluten; the bacteria produce lactic and acetic acid, which give the "
        "taste and slow down moulds. Warm, wet starters favour the milder lactic acid, cool and stiff ones the "
        "sharper acetic acid. In doughs with much rye the acid is needed for another reason: it holds back enzymes "
        "that would otherwise turn starch into sugar while the loaf is in the oven and leave the crumb sticky.",
    ),
    (
        "Tidal locking",
        "A moon is tidally locked when it turns once on its axis in the time of one orbit, so that the same side "
        "always faces the planet. The planet's gravity stretches the moon into a slight bulge. While the moon spins "
        "faster than it orbits, friction carries the bulge ahead of the line between the two bodies, and gravity "
        "pulls it back, which slows the spin until both periods agree. Nearly all large moons of the solar system "
        "have reached this state. From the Earth about 59 percent of the surface of the Moon can be seen over time, "
        "because its orbit is not a perfect circle and is tilted.",
    ),
    (
        "Kites for weather",
        "Before balloons and aircraft, kites carried instruments into the air above weather stations. Box kites on "
        "several kilometres of steel wire lifted a recorder that drew temperature, pressure and humidity on a turning "
        "drum. A train of kites reached 7,000 metres on good days. The wire could be dangerous when it picked up "
        "charge under a cloud.",
    ),
)


def warm_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The text's token ids, the first 900 at most: each passage tokenised alone, as the documents of a prompt are."""
    ids: list[int] = []
    for title, text in PASSAGES:
        ids += chunk_ids(tokenizer, title, text)
        if len(ids) >= WARM_TOKENS_MAX:
            break
    return tuple(ids[:WARM_TOKENS_MAX])
