"""A fixed text that has nothing to do with any prompt, for chunks to be computed behind (`warm` conditioning).

Its words end up in chunk keys by their token ids: with another text every chunk stored warm would be a miss.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvblend.engine.prompt import cut_chunk_ids
from kvblend.engine.tokenizer import Tokenizer

WARM_TOKENS_MAX = 2048
PASSAGE_TOKENS_MAX = 512
PASSAGES: tuple[tuple[str, str], ...] = (
    (
        "Columnar basalt",
        "Columnar basalt forms when a thick lava flow cools and shrinks. The surface loses heat first, and because "
        "rock contracts as it cools, tension builds up until cracks open. Cracks that meet at angles near 120 "
        "degrees release the most stress for the least new surface, so a network of mostly six-sided figures "
        "appears. As cooling moves inward the cracks follow it, and long prisms are left standing at right angles "
        "to the surface that lost the heat. Slow cooling makes wide columns, sometimes two metres across; fast "
        "cooling makes thin ones. Five- and seven-sided columns are common too. Well-known examples lie on the "
        "coast of Northern Ireland, on an island off western Scotland, and in the gorges of Iceland and Armenia.",
    ),
    (
        "Double-entry bookkeeping",
        "In double-entry bookkeeping every transaction is written down twice, as a debit in one account and as a "
        "credit in another. If a shop buys flour for 40 coins, the stock account rises by 40 and the cash account "
        "falls by the same amount. Since both sides are always equal, the sum of all debits must match the sum of "
        "all credits, and a trial balance shows at once whether an entry was forgotten or copied wrongly. Merchants "
        "in the cities of northern Italy used the method by the fourteenth century, and a printed description of it "
        "appeared in Venice in 1494. It does not catch every mistake: an amount that is booked in the wrong "
        "account, but on both sides, leaves the totals in balance.",
    ),
    (
        "Weaver ants",
        "Weaver ants live in trees in the tropics of Africa, Asia and northern Australia. They build nests of "
        "living leaves. Rows of workers hold on to the edge of one leaf, grip the next one with their jaws and "
        "pull; when the gap is wide they form chains, each ant holding the waist of the one before it. Once the "
        "edges touch, other workers bring larvae that are about to pupate, and move them back and forth like "
        "shuttles while they give off silk. The silk glues the seam. A large colony may keep more than a hundred "
        "nests in a dozen trees. Citrus growers in southern China have used such ants against pests for at least "
        "sixteen centuries, tying bamboo strips between trees as bridges.",
    ),
    (
        "Canal locks",
        "A lock lifts boats from one level of a canal to another without pumps. It is a chamber with watertight "
        "gates at both ends. To go up, a boat enters at the lower level and the lower gates are closed behind it. "
        "Sluices in the upper gates are opened, water flows in by its own weight, and the boat rises until the "
        "surface inside is level with the upper reach; only then can the upper gates be swung open. Mitre gates "
        "meet in a shallow V that points upstream, so that the pressure of the water holds them shut. Every passage "
        "lets one chamber of water run downhill, which is why summit levels need reservoirs. Side ponds can save "
        "about half of it.",
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
        "several kilometres of steel wire lifted a recorder that drew temperature, pressure and humidity on a "
        "turning drum. A train of kites reached 7,000 metres on good days. The wire could be dangerous when it "
        "picked up charge under a cloud.",
    ),
    (
        "Salt from sea water",
        "Salt works by the sea are rows of shallow clay basins. Water enters the first basin at high tide and is "
        "led on as it grows heavier. In the first basins lime and gypsum settle, which would spoil the taste. Only "
        "in the last, where about nine tenths of the water are gone, does common salt form crystals. It is raked "
        "into heaps before the remaining brine, rich in magnesium, turns bitter. A dry wind matters more for the "
        "harvest than great heat, and one summer storm can undo the work of two weeks.",
    ),
    (
        "The lens of a lighthouse",
        "A solid lens large enough for a lighthouse would be as thick as a wall and would swallow much of the "
        "light. In 1822 a lens was designed in France that keeps only the curved surface, cut into rings and set "
        "side by side like steps. Prisms above and below the rings catch light that would be lost to the sky and "
        "the rocks. Lenses were built in six orders by focal length; the first order, 920 millimetres, served for "
        "landfall lights. Many turned on a bath of mercury, so that a hand could move several tonnes.",
    ),
    (
        "Earthworms",
        "Earthworms have neither lungs nor eyes. They breathe through a moist skin and tell light from dark with "
        "cells spread over the front of the body. Some species live in the litter, some in the top soil, and some "
        "dig upright burrows two metres deep, from which they come at night to pull in leaves. What passes through "
        "them returns as casts with more lime and nitrogen than the soil around. A hectare of old meadow may hold "
        "two tonnes of worms, while a ploughed field holds a fraction of that.",
    ),
    (
        "Gauge of railways",
        "The distance between the inner faces of two rails is called the gauge. More than half of the railways of "
        "the world keep 1,435 millimetres, a width taken from the wagon ways of English collieries. Wider tracks "
        "were laid in Russia, Spain and India, narrower ones in mountains, where curves could be tighter and "
        "tunnels smaller. Where two gauges meet, goods are loaded anew, the wheel sets are exchanged, or the wheels "
        "slide on their axles while the train rolls slowly through a frame.",
    ),
    (
        "Peat",
        "Peat forms where plants grow faster than they decay, because the ground is wet and holds little oxygen. A "
        "raised bog gains about one millimetre in a year, so that five metres took five thousand years. Bog moss "
        "stores twenty times its dry weight in water and makes its surroundings acid. Pollen, wood and even leather "
        "last in it, and from the layers one can read how forests came and went. Drained bogs sink, dry out and "
        "give off carbon dioxide.",
    ),
    (
        "How a sextant works",
        "A sextant measures the angle between two things that are seen at the same time, such as the sun and the "
        "horizon. One mirror is fixed and half clear; the other sits on an arm that moves along an arc of sixty "
        "degrees. As a ray turns by twice the angle of the mirror, the arc is marked up to 120. Because both images "
        "move together when the ship rolls, the reading is steady. An error of one minute of arc puts the ship off "
        "by one nautical mile.",
    ),
    (
        "Paper from rags",
        "Before wood was used, European paper was made of linen and hemp rags. They were sorted, left to rot for "
        "weeks and beaten to fibres by stampers driven by a water wheel. A worker dipped a mould of brass wire into "
        "the vat and shook it so that the fibres crossed. Each sheet was pressed between felts, hung up to dry and "
        "drawn through warm glue made of hides, without which ink would spread. A vat gave about two thousand "
        "sheets in a day.",
    ),
)


def passages_of(text: str) -> Sequence[tuple[str, str]]:
    """`(title, text)` of a text's paragraphs, which empty lines part, without titles; the shipped ones for no text."""
    found = [("", paragraph.strip()) for paragraph in re.split(r"\n\s*\n", text)]
    return [passage for passage in found if passage[1]] or PASSAGES


def warm_ids(
    tokenizer: Tokenizer, context_length: int, passages: Sequence[tuple[str, str]] = PASSAGES
) -> tuple[int, ...]:
    """The text's token ids: whole passages, each tokenised alone as the documents of a prompt are.

    As many as fit into 2,048 tokens and a quarter of `context_length`; of a very small context none. The text ends
    where a passage does, because a document follows the end of another one in a prompt, too. `passages` are
    `(title, text)`; text in the manner of the corpus serves much better than the shipped one (docs/quality.md). Of one
    longer than 512 tokens the end is left out.
    """
    limit = min(WARM_TOKENS_MAX, context_length // 4)
    ids: list[int] = []
    for title, text in passages:
        passage = cut_chunk_ids(tokenizer, title, text, PASSAGE_TOKENS_MAX)
        if len(ids) + len(passage) > limit:
            break
        ids += passage
    return tuple(ids)
