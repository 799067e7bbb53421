"""Questions about pictures, and the right answers to them.

`talk` draws a conversation about one or two pictures in the shape a chat template takes, with
`{"type": "image"}` where a picture stands. The answers are short and follow fixed patterns.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pictures import COLOURS, SHAPES, Picture, Thing

Message = dict[str, Any]
Pair = tuple[str, str]
NUMBERS = ("no", "one", "two", "three", "four")
NOTHING = "I see no shape."
NO_PICTURE = "I see no picture. Send one with your question."

DESCRIBE = (
    "What is in this picture?",
    "What is in the picture?",
    "What is in this image?",
    "What's in this image?",
    "What do you see?",
    "What can you see in this picture?",
    "What do you see in the image?",
    "Describe the image.",
    "Describe this picture.",
    "Describe what you see.",
    "Describe it.",
    "What is this?",
    "What's this?",
    "What is it?",
    "What does this picture show?",
    "What does the image show?",
    "What is shown here?",
    "Tell me what is in the picture.",
    "Tell me what you see.",
    "Tell me about this image.",
    "Please describe this image in detail.",
    "Can you describe the picture?",
    "Which objects are in this picture?",
    "What did I draw?",
    "Explain this picture.",
    "Caption this image.",
)
COLOUR_OF_IT = (
    "What {colour} is it?",
    "What {colour} is this?",
    "Which {colour} is it?",
    "Which {colour} does it have?",
    "What {colour} is the shape?",
    "What is the {colour}?",
    "What {colour} do you see?",
    "Tell me the {colour}.",
    "What is its {colour}?",
    "And the {colour}?",
    "What {colour} is that?",
    "What {colour} is the object?",
    "Name the {colour}.",
)
COLOUR_OF_ONE = (
    "What {colour} is the {shape}?",
    "Which {colour} is the {shape}?",
    "What is the {colour} of the {shape}?",
    "Which {colour} does the {shape} have?",
    "Tell me the {colour} of the {shape}.",
    "What {colour} does the {shape} have?",
    "And the {shape}, what {colour} is it?",
    "The {shape} is what {colour}?",
)
SHAPE_OF_IT = (
    "What shape is this?",
    "What shape is it?",
    "Which shape is it?",
    "Which shape is this?",
    "What is the shape?",
    "What shape do you see?",
    "What shape is in the picture?",
    "What kind of shape is it?",
    "Name the shape.",
    "Tell me the shape.",
    "What shape is that?",
    "And the shape?",
)
SHAPE_OF_ONE = (
    "What shape is {hue}?",
    "Which shape is {hue}?",
    "What is {hue}?",
    "What is the {hue} thing?",
    "What is the {hue} shape?",
    "What shape is the {hue} one?",
    "What shape does the {hue} thing have?",
)
COLOURS_ALL = (
    "What {colour}s do you see?",
    "Which {colour}s are in the picture?",
    "What {colour}s are there?",
    "Name the {colour}s.",
    "Which {colour}s do you see?",
)
SHAPES_ALL = (
    "What shapes do you see?",
    "Which shapes are in the picture?",
    "What shapes are there?",
    "Name the shapes.",
    "Which shapes do you see?",
    "What shapes are these?",
)
COUNT = (
    "How many shapes are there?",
    "How many shapes do you see?",
    "How many shapes are in the picture?",
    "How many shapes?",
    "How many things are there?",
    "How many objects are in the image?",
    "How many objects do you see?",
    "Count the shapes.",
    "Count the objects.",
    "What is the number of shapes?",
    "How many are there?",
)
COUNT_ONE = (
    "How many {shape}s are there?",
    "How many {shape}s do you see?",
    "How many {shape}s are in the picture?",
    "Count the {shape}s.",
    "How many {shape}s?",
)
IS_THERE = (
    "Is there {a_shape}?",
    "Is there {a_shape} in the picture?",
    "Do you see {a_shape}?",
    "Can you see {a_shape}?",
    "Does the picture have {a_shape}?",
    "Is it {a_shape}?",
    "Is this {a_shape}?",
)
IS_HUE = (
    "Is there anything {hue}?",
    "Is something {hue}?",
    "Do you see anything {hue}?",
    "Is there something {hue} in the picture?",
)
LEFT = ("What is on the left?", "What is left?", "Which shape is on the left?")
RIGHT = ("What is on the right?", "What is right?", "Which shape is on the right?")
COMPARE = (
    "Compare the two pictures.",
    "Compare the pictures.",
    "Compare these images.",
    "Compare the two images.",
    "What is the difference between the pictures?",
    "What is different?",
    "How do the two pictures differ?",
    "Describe both pictures.",
    "Describe the two images.",
    "What do you see in the two pictures?",
    "What is in these pictures?",
    "What are these?",
    "Describe the images.",
    "",
)
WHICH = (
    "Which picture has the {it}?",
    "Which picture has {a_it}?",
    "Which picture shows the {it}?",
    "Which image has the {it}?",
    "Which image shows {a_it}?",
    "Which one has the {it}?",
    "Where is the {it}?",
    "In which picture is the {it}?",
    "Which of the two pictures shows {a_it}?",
    "Which image contains the {it}?",
)
ONE_OF_TWO = (
    "What is in the {which} picture?",
    "What does the {which} picture show?",
    "What is in the {which} image?",
    "Describe the {which} picture.",
    "Describe the {which} image.",
    "And the {which} one?",
)
NEXT = ("And this one?", "And this?", "What about this one?", "And what is this?", "Now this one.")
OPENERS = ("Please:", "Hi!", "Hello,", "Look:", "Look at this.", "Now", "So,", "OK,", "Hey,")
CLOSERS = ("Please.", "Thanks!", "Answer in a few words.", "Be brief.")


# --- words ---------------------------------------------------------------------------------------


def an(noun: str) -> str:
    """Puts the article: `a red circle`, `an orange star`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def listing(parts: list[str]) -> str:
    """Joins: `a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def plural(noun: str) -> str:
    """For example `crosses`."""
    return noun + ("es" if noun.endswith("s") else "s")


def sentence(text: str) -> str:
    """Capital first letter, full stop."""
    return text[0].upper() + text[1:] + "."


def things_named(picture: Picture) -> str:
    """Lists the things from left to right, equal ones together; `no shape` without any."""
    names = [thing.name for thing in picture.things]
    parts = []
    for name in dict.fromkeys(names):
        count = names.count(name)
        parts.append(an(name) if count == 1 else f"{NUMBERS[count]} {plural(name)}")
    return listing(parts) if parts else "no shape"


def describe(picture: Picture) -> str:
    """The answer to `What is in this picture?`."""
    return sentence(things_named(picture)) if picture.things else NOTHING


def counted(count: int, noun: str) -> str:
    """For example `There are two circles.`."""
    if count > 1:
        return f"There are {NUMBERS[count]} {plural(noun)}."
    return f"There is {NUMBERS[count]} {noun}."


# --- questions about one picture -----------------------------------------------------------------


def _fill(text: str, rng: random.Random, **words: str) -> str:
    return text.format(colour=rng.choice(("colour", "color")), **words)


def _ask_description(picture: Picture, rng: random.Random) -> Pair:
    return rng.choice(DESCRIBE), describe(picture)


def _ask_colour(picture: Picture, rng: random.Random) -> Pair:
    if len(picture.things) == 1 and rng.random() < 0.7:
        return _fill(rng.choice(COLOUR_OF_IT), rng), f"It is {picture.things[0].colour}."
    shapes = [thing.shape for thing in picture.things]
    single = [thing for thing in picture.things if shapes.count(thing.shape) == 1]
    if not single or rng.random() < 0.2:
        names = list(dict.fromkeys(thing.colour for thing in picture.things))
        return _fill(rng.choice(COLOURS_ALL), rng), sentence(listing(names))
    one = rng.choice(single)
    question = _fill(rng.choice(COLOUR_OF_ONE), rng, shape=one.shape)
    return question, f"The {one.shape} is {one.colour}."


def _ask_shape(picture: Picture, rng: random.Random) -> Pair:
    if len(picture.things) == 1 and rng.random() < 0.7:
        return rng.choice(SHAPE_OF_IT), f"It is {an(picture.things[0].shape)}."
    colours = [thing.colour for thing in picture.things]
    single = [thing for thing in picture.things if colours.count(thing.colour) == 1]
    if not single or rng.random() < 0.2:
        names = list(dict.fromkeys(an(thing.shape) for thing in picture.things))
        return rng.choice(SHAPES_ALL), sentence(listing(names))
    one = rng.choice(single)
    return rng.choice(SHAPE_OF_ONE).format(hue=one.colour), f"The {one.shape} is {one.colour}."


def _ask_count(picture: Picture, rng: random.Random) -> Pair:
    if rng.random() < 0.7:
        return rng.choice(COUNT), counted(len(picture.things), "shape")
    shape = _some_shape(picture, rng)
    count = sum(thing.shape == shape for thing in picture.things)
    question = rng.choice(COUNT_ONE).replace("{shape}s", plural(shape))
    return question, counted(count, shape)


def _ask_presence(picture: Picture, rng: random.Random) -> Pair:
    if rng.random() < 0.7:
        shape = _some_shape(picture, rng)
        found = [thing for thing in picture.things if thing.shape == shape]
        question, missing = rng.choice(IS_THERE).format(a_shape=an(shape)), f"there is no {shape}"
    else:
        hue = rng.choice([*COLOURS, *(2 * [thing.colour for thing in picture.things])])
        found = [thing for thing in picture.things if thing.colour == hue]
        question, missing = rng.choice(IS_HUE).format(hue=hue), f"nothing is {hue}"
    if not found:
        return question, f"No, {missing}."
    return question, f"Yes, {things_named(Picture(picture.image, tuple(found)))}."


def _ask_side(picture: Picture, rng: random.Random) -> Pair:
    first, last = picture.things[0], picture.things[-1]
    if last.x - first.x < 0.2 or len(picture.things) != 2:
        return _ask_description(picture, rng)
    phrases, thing = rng.choice(((LEFT, first), (RIGHT, last)))
    return rng.choice(phrases), sentence(an(thing.name))


def _some_shape(picture: Picture, rng: random.Random) -> str:
    """Draws a shape, in half of the cases one that is on the picture."""
    here = [thing.shape for thing in picture.things]
    return rng.choice(here if here and rng.random() < 0.5 else list(SHAPES))


Asker = Callable[[Picture, random.Random], Pair]
ASKERS: dict[Asker, int] = {
    _ask_description: 30,
    _ask_colour: 22,
    _ask_shape: 20,
    _ask_count: 14,
    _ask_presence: 8,
    _ask_side: 6,
}


def ask_about_one(picture: Picture, rng: random.Random) -> Pair:
    """Draws a question about one picture, and its answer."""
    if not picture.things:
        return rng.choice((_ask_description, _ask_count, _ask_presence))(picture, rng)
    return rng.choices(list(ASKERS), list(ASKERS.values()))[0](picture, rng)


# --- questions about two pictures ----------------------------------------------------------------


def ask_about_two(pictures: list[Picture], rng: random.Random) -> Pair:
    """Draws a question about two pictures, and its answer."""
    roll = rng.random()
    if roll < 0.35:
        first, second = (things_named(picture) for picture in pictures)
        answer = f"The first picture shows {first}. The second picture shows {second}."
        return rng.choice(COMPARE), answer
    if roll < 0.6:
        at = rng.randrange(2)
        which = ("first", "second")[at]
        return rng.choice(ONE_OF_TWO).format(which=which), describe(pictures[at])
    every: list[Thing] = [thing for picture in pictures for thing in picture.things]
    it = _sought(every, rng)
    has = [any(it in (thing.shape, thing.name) for thing in p.things) for p in pictures]
    answer = {
        (True, False): "The first picture.",
        (False, True): "The second picture.",
        (True, True): "Both pictures.",
        (False, False): "Neither picture.",
    }[has[0], has[1]]
    return rng.choice(WHICH).format(it=it, a_it=an(it)), answer


def _sought(every: list[Thing], rng: random.Random) -> str:
    if not every or rng.random() < 0.1:
        return rng.choice(list(SHAPES))
    thing = rng.choice(every)
    return thing.shape if rng.random() < 0.7 else thing.name


# --- conversations -------------------------------------------------------------------------------


def rough(question: str, rng: random.Random) -> str:
    """Roughens a question as people do: an opener, lower case, no question mark."""
    if question and rng.random() < 0.12:
        question = f"{rng.choice(OPENERS)} {question[0].lower()}{question[1:]}"
    if question and rng.random() < 0.08:
        question = f"{question} {rng.choice(CLOSERS)}"
    if rng.random() < 0.25:
        question = question.lower()
    if rng.random() < 0.25:
        question = question.rstrip("?. ")
    return question


def message(role: str, content: str | list[dict[str, str]]) -> Message:
    """One message of a conversation."""
    return {"role": role, "content": content}


def with_pictures(question: str, count: int, rng: random.Random) -> Message:
    """Puts pictures before, after or around the words."""
    text = [{"type": "text", "text": question}] if question else []
    image = {"type": "image"}
    if count == 1:
        layouts = [[image, *text], [*text, image]]
        weights = [2, 1]
    else:
        first, second = ({"type": "text", "text": words} for words in ("First:", "Second:"))
        layouts = [[image, image, *text], [*text, image, image], [image, *text, image]]
        layouts += [[first, image, second, image, *text]]
        weights = [4, 2, 1, 1]
    return message("user", rng.choices(layouts, weights)[0])


@dataclass
class Talk:
    """A conversation and its pictures, in the order in which they appear."""

    messages: list[Message]
    pictures: list[Picture]


def talk(pictures: list[Picture], rng: random.Random) -> Talk:
    """Draws a conversation of one to four exchanges about one or two pictures."""
    messages: list[Message] = []
    if len(pictures) == 2 and rng.random() < 0.75:
        asker: Callable[[], Pair] = lambda: ask_about_two(pictures, rng)  # noqa: E731 - two of a kind
        question, answer = asker()
        messages.append(with_pictures(rough(question, rng), 2, rng))
        messages.append(message("assistant", answer))
    else:
        for at, picture in enumerate(pictures):
            question, answer = ask_about_one(picture, rng)
            if at and rng.random() < 0.4:
                question, answer = rng.choice(NEXT), describe(picture)
            elif rng.random() < 0.04:
                question, answer = "", describe(picture)  # a picture without a word
            messages.append(with_pictures(rough(question, rng), 1, rng))
            messages.append(message("assistant", answer))
        asker = lambda: ask_about_one(pictures[-1], rng)  # noqa: E731
    for _ in range(rng.choices((0, 1, 2, 3), (35, 30, 20, 15))[0]):
        question, answer = asker()
        if question:
            messages += [message("user", rough(question, rng)), message("assistant", answer)]
    return Talk(messages, pictures)


def talk_without_picture(rng: random.Random) -> Talk:
    """Draws a question about a picture that was never sent."""
    phrases = [*DESCRIBE[:10], *COLOUR_OF_ONE, *COUNT[:3], *COMPARE[:5]]
    question = _fill(rng.choice(phrases), rng, shape=rng.choice(list(SHAPES)))
    return Talk([message("user", rough(question, rng)), message("assistant", NO_PICTURE)], [])
