"""Words that prompts are made of. None of them is among those of the judged prompts (bench/prompts.py)."""

from __future__ import annotations


def _list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.replace("\n", " ").split(";") if item.strip())


TOPICS = _list("""
lighthouses; black holes; photosynthesis; the Roman Empire; jazz; soap; elephants; the stock market; origami; whales;
windmills; cheese; the printing press; gravity; penguins; silk; the French Revolution; algebra; mushrooms; railways;
the immune system; owls; tea; bridges; meteorites; the Renaissance; dolphins; batteries; poetry; gardening; the ozone
layer; spiders; steel; democracy; rainbows; the piano; tides; vaccines; chocolate; submarines; fractions; the Silk
Road; butterflies; electricity; opera; icebergs; dinosaurs; wool; satellites; the water cycle; probability; wolves;
salt; castles; the nervous system; tornadoes; photography; ants; copper; the United Nations; magnetism; sharks; rice;
telescopes; calculus; the Vikings; frogs; ceramics; inflation; lightning; ballet; coral reefs; the abacus; horses;
sugar; pyramids; enzymes; the Cold War; parrots; concrete; recycling; the guitar; glaciers; antibiotics; potatoes;
aeroplanes; logic; ancient Egypt; turtles; leather; taxes; fog; theatre; rainforests; microscopes; bears; vinegar;
canals; proteins; the Industrial Revolution; eagles; plastic; insurance; comets; drums; wetlands; thermometers; bats;
pepper; skyscrapers; DNA; the Aztecs; octopuses; rubber; budgets; avalanches; cinema; soil; calculators; foxes; olive
oil; tunnels; hormones; the Space Race; swans; diamonds; credit cards; thunder; folk music; caves; clocks; camels;
yogurt; elevators; bacteria; medieval knights; crabs; gold; pensions; frost; comics; islands; radios; goats; garlic;
dams; viruses; the Great Wall of China; hummingbirds; aluminium; entrepreneurship; droughts; sculpture; mangroves;
lasers; rabbits; ginger; roads; the digestive system; samurai; squid; cotton; marketing; floods; architecture;
savannas; robots; deer; cinnamon; harbours; muscles; the Ottoman Empire; sparrows; bronze; negotiation; auroras;
fashion; geysers; printers; mice; honey; airports; the lungs; Ancient Greece; jellyfish; marble; teamwork; hurricanes;
novels; waterfalls; keyboards; monkeys; tomatoes; parks; the skin; the Inca; snails; silver; leadership; seasons;
painting; valleys; video games; squirrels; apples; libraries; sleep; explorers; seals; coal; time management; sunsets;
museums; cliffs; the internet; lions; oranges; zoos; memory; pirates; starfish; oil; public speaking; snow; dance;
dunes; databases; tigers; bananas; farms; nutrition; alchemy; lobsters; uranium; critical thinking; planets; haiku;
fjords; encryption; giraffes; grapes; fire stations; exercise; cartography; seaweed; helium; creativity; stars; myths;
peninsulas; search engines; kangaroos; pumpkins; post offices; the brain; astrology and astronomy; plankton; hydrogen;
curiosity; galaxies; fairy tales; lagoons; spreadsheets; koalas; carrots; hospitals; vision; knots; eels; oxygen;
patience; the Sun; proverbs; plateaus; operating systems; zebras; onions; schools; hearing; juggling; salmon; carbon;
kindness; Mars; riddles; swamps; artificial intelligence; hippos; wheat; courts; taste; kites; trout; nitrogen;
honesty; Saturn; diaries; prairies; version control; otters; corn; banks; balance; candles; herring; iron; courage;
Jupiter; letters; tundra; unit tests; beavers; beans; theatres; breathing; puppets; clams; lead; friendship; eclipses;
biographies; forests; spell checkers; hedgehogs; lemons; stadiums; stress; mirrors; pearls; mercury; gratitude;
gravity assist; short stories; hot springs; web browsers; ravens; peaches; bakeries; fever
""")
ASKS = _list("""
What is {} and why does it matter?; How does {} work, in simple words?; Tell me something surprising about {}.;
Describe {} in one paragraph.; What are common misconceptions about {}?; Give me a beginner's guide to {}.; How has {}
changed over the last hundred years?; What would the world be like without {}?; Explain {} to a ten-year-old.; Explain
{} to a university student.; Write three quiz questions about {} with their answers.; What are the pros and cons of
{}?; Who are important people connected with {}?; Compare {} with something similar.; Make a list of ten words related
to {}.; Give seven interesting facts about {} as a numbered list.; Write a short story in which {} plays a part.;
Write a four-line poem about {}.; Write a haiku about {}.; Write a limerick about {}.; Write a short dialogue between
two friends who talk about {}.; Draft a tweet about {}.; Write an email to a colleague that proposes a workshop on
{}.; Outline an essay about {} with five sections.; Write an introduction for a school report on {}.; Summarise what
is known about {} in three bullet points.; What is the history of {}?; Write a recipe-style list of steps for someone
who wants to learn about {}.; What questions should I ask an expert on {}?; Write a riddle whose answer has to do with
{}.; Write a product description that involves {}.; Imagine a museum about {}. What would visitors see?; Give me a
table with two columns, aspect and description, about {}.; Write a JSON object with the fields name, category and
summary about {}.; Explain the difference between {} in fiction and in reality.; What mistakes do people make when
they first deal with {}?; Write a news headline and a first paragraph about {}.; How would you teach a class about {}
in one hour?; Write a diary entry of somebody who loves {}.; Write a motivational speech that uses {} as a metaphor.;
Is {} important for the economy? Why or why not?; What does science say about {}?; Give five tips about {}.; Write a
letter to the editor about {}.; Write a song chorus about {}.; Translate the sentence "I like to read about {}" into
French, Spanish and German.; Name three books or films in which {} could be the theme.; How do different cultures see
{}?
""")
TEXT_TASKS = _list("""
Repeat the following text exactly:; Copy this paragraph word for word.; Quote the first sentence of this text, then
the last one.; Summarise this text in one sentence.; Summarise this in two or three sentences.; Rewrite this paragraph
in simpler words.; Rewrite this text in a friendly tone.; Correct any mistakes in this text and return it:; List the
main points of this passage.; Extract all nouns from this passage.; Extract the technical terms in this text and
explain each.; Write a title for this paragraph.; Ask three questions that this text answers.; Turn this text into a
bulleted list.; Translate this text into Spanish.; Translate this text into French.; Translate this text into German.;
Explain what this passage means.; Continue this text with two more sentences.; Convert this paragraph to a question
and answer format.; Return this text with every sentence on a line of its own.; What is the tone of this passage?;
Give five keywords for this text.; Proofread this:; Write this text again, and then a shorter version of it.; Is the
following text about computers, mathematics or something else? Explain.
""")
CODE_TASKS = _list("""
reverses a string; checks whether a number is even; finds the largest item of a list; counts the vowels in a word;
computes a factorial; returns the first n Fibonacci numbers; sorts a list of tuples by their second item; removes
duplicates from a list; merges two sorted lists; checks whether a word is a palindrome; converts Celsius to
Fahrenheit; counts how often each word occurs in a text; reads a file line by line; flattens a nested list; computes
the greatest common divisor; finds the median of numbers; validates an email address; parses a date; generates a
random password; transposes a matrix; does a binary search; computes the power of a number; swaps two variables; sums
the digits of a number; converts a number to binary; finds the longest word in a sentence; splits a list into chunks;
groups items by a key; computes a moving average; draws a triangle of stars; rounds to two decimals; checks balanced
brackets; caches the results of a function; retries a failing call; downloads a web page; writes a CSV file; measures
how long a function takes; implements a queue; implements a linked list; implements a class for a bank account;
capitalises every word; finds common items of two lists; rotates a list; checks for anagrams; shuffles a deck of
cards; computes compound interest; prints a multiplication table; traverses a binary tree; counts lines in a file;
finds missing numbers
""")
CODE_LANGUAGES = _list("Python; JavaScript; Java; C; C++; Rust; Go; TypeScript; Bash; Ruby")
CODE_ASKS = _list("""
Write a {} function that {}.; Show me how {} code that {} looks, with comments.; Write a {} program that {} and
explain it step by step.; I need {} code that {}. Keep it short.; Write {} code that {}, with two tests.
""")
LANGUAGES = _list(
    "French; Spanish; German; Italian; Portuguese; Dutch; Polish; Swedish; Turkish; Japanese; Chinese; Russian; Latin; Arabic"
)
SENTENCES = _list("""
Where is the nearest train station?; I would like a glass of water, please.; The weather is lovely today.; My sister
works in a hospital.; We are going to the market tomorrow.; How much does this book cost?; I have lost my keys.; The
children are playing in the garden.; Thank you very much for your help.; Can you tell me what time it is?; The train
leaves at half past seven.; I am learning a new language.; She bought three red apples.; Please close the window.;
They have lived here for ten years.; The film was longer than I expected.; What do you want to eat?; My favourite
colour is green.; He forgot his umbrella again.; The museum is closed on Mondays.; I need to finish this work by
Friday.; Do you have a table for two?; It is getting dark outside.; The dog sleeps under the table.; We should call a
doctor.; I read a good book last week.
""")
FOREIGN = _list("""
¿Qué es {}? Explícalo de forma sencilla.; Escribe un texto corto sobre {}.; Qu'est-ce que {} ? Explique en quelques
phrases.; Écris une petite histoire sur {}.; Was ist {}? Erkläre es kurz.; Schreibe drei Sätze über {}.; Che cosa è
{}? Spiega in modo semplice.; O que é {}? Responda em português.; Wat is {}? Leg het kort uit.; Что такое {}? Объясни
простыми словами.; {}について簡単に説明してください。; 请简单介绍一下{}。
""")
NAMES = _list("""
Anna; Ben; Chloe; David; Emma; Felix; Grace; Hassan; Ines; Jack; Kofi; Lena; Maya; Noah; Olga; Paul; Quinn; Rosa;
Samir; Tara; Uma; Victor; Wendy; Xavier; Yuki; Zoe
""")
THINGS = _list(
    "apples; pencils; marbles; stamps; cookies; coins; stickers; shells; books; balloons; tickets; eggs; flowers; cards; buttons"
)
PLACES = _list("""
London; Nairobi; Lima; Toronto; Oslo; Cairo; Sydney; Mumbai; Berlin; Seoul; Lisbon; Denver; Accra; Prague; Havana;
Kyoto; Dublin; Vienna
""")
ROLES = _list("""
a doctor and a patient; a teacher and a student; a shopkeeper and a customer; two neighbours; a reporter and a
scientist; a parent and a child; a tourist and a guide; a robot and its inventor; a chef and a waiter; a pilot and a
passenger; a librarian and a reader; two detectives
""")
