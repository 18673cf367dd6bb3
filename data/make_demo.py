"""Write demo.tsv: about 12,800 English-Bengali sentence pairs made from a small hand-written grammar.

    python data/make_demo.py             writes demo.tsv beside this file (--out FILE: elsewhere), after its checks
    python data/make_demo.py --list      prints each template family with its count and an example; writes nothing

What it is for: a corpus which a small Transformer learns in minutes on a laptop, whose held-out sentences are unseen
combinations of seen words, and in which each English sentence has exactly one right answer, so that exact match
means something.  It is not a sample of real text.  The text was made for this project and has its licence (MIT).

Bengali marks politeness in the pronoun and the verb; English does not.  So the English says it, by these rules:
  you     always comes with a vocative.  A title (Sir, Madam, Doctor, Mr Sen, Mrs Roy; plural: Gentlemen, Dear guests,
          Respected teachers) makes it polite: আপনি, আপনারা.  A first name or My friend (plural: Children, Boys, Girls,
          Friends) makes it familiar: তুমি, তোমরা.  The same vocative settles "your", an object "you", an imperative.
  nouns   Parents, grandparents, uncles, aunts, titles, guests and people named by their profession are polite (verb
          in -ন); children, students, brothers, sisters, friends, first names and animals are familiar.
  he/she/they  with nothing before them are familiar (সে, তারা); when they, or his/her/their, take up a noun of the
          same sentence they copy its politeness (তিনি, তাঁরা, তাঁর).  As objects they are familiar (তাকে, তাদের).
Also: reads = habitual present, is reading = continuous, read = simple past, will read = future; present and past
statements have a time word, as "I read" alone could be either (not "lives", "knows", "loves").  জল for water; -টি in
"a/two ..." but -টা for "the" thing; -জন for people; time before place and object; the wh-word after a definite object
or a place, but before a bare or counted object (বইটা কে পড়ল, কে ভাত খেল).

Grammar covered: subject-object-verb order; agreement in five persons and four tenses; negation (না, -নি, নই/নও/নয়/নন,
নেই); yes/no questions with কি, and কী, কে, কোথায়, কখন, কেন, কয়টি; locative, genitive, accusative; classifiers;
postpositions; possession with আছে; the zero copula; infinitives with want, can, like, have to; imperatives.
"""
import argparse
import itertools
import random
import re
import unicodedata
from collections import Counter, namedtuple
from functools import partialmethod
from pathlib import Path

SEED, PERSONS, TENSES = 2017, "123H", "PCAF"   # H: polite second and third person; Present, Continuous, pAst, Future


def rows(table):
    """Rows end at a newline or ";", cells at "|"."""
    return [[cell.strip() for cell in row.split("|")] for row in re.split(r"[;\n]", table.strip())]


def pairs_of(table):
    return dict(pair.strip().split("=") for pair in table.split(","))


def join(*parts):
    return " ".join(part for part in parts if part)


def finish(subject, en, bn, question):
    """Adds the vocative, the capital and the end marks: a danda or a question mark."""
    if subject.voc:
        en, bn = f"{subject.voc}, {en}", f"{subject.voc_bn}, {bn}"
    return en[0].upper() + en[1:] + ("?" if question else "."), bn + ("?" if question else "।")


# ---- Bengali verbs --------------------------------------------------------------------------------------------------
# name: present of I, tumi, se, polite | stems of continuous, past, future (one if alike) | infinitive | polite imp.
# Traps: খেলে is "plays" and also "you ate"; গা keeps its ই before every ending; এলাম, গেলাম, খেলাম have past stems.
STEMS = {name: cells for name, *cells in rows("""
খা | খাই খাও খায় খান | খাচ্ খে খা | খেতে | খান
দে | দিই দাও দেয় দেন | দিচ্ দি দে | দিতে | দিন
যা | যাই যাও যায় যান | যাচ্ গে যা | যেতে | যান
আস | আসি আসো আসে আসেন | আস এ আস | আসতে | আসুন
গা | গাই গাও গায় গান | গাই | গাইতে | গান
চা | চাই চাও চায় চান | চাই | চাইতে | চান""")}
# Regular consonant stems.  Where two are given the vowel alternates: low in লেখো লেখে লেখেন, high elsewhere (লিখি).
for stem in ("পড় লেখ/লিখ কেন/কিন কর দেখ শোন/শুন আন ফের/ফির থাক খেল হাঁট খোল/খুল খোঁজ/খুঁজ ডাক শেখ/শিখ আঁক কাট বল নাচ "
             "চেন/চিন ভালোবাস পার").split():
    low, high = (stem + "/" + stem).split("/")[:2]
    STEMS[low] = [f"{high}ি {low}ো {low}ে {low}েন", high, high + "তে", high + "ুন"]
for stem in "পাঠা দেখা পড়া ঘুমা দৌড়া".split():       # stems in আ: a glide in the present, চ্ছ in the continuous
    STEMS[stem] = [f"{stem}ই {stem}ও {stem}য় {stem}ন", f"{stem}চ্ {stem} {stem}", stem + "তে", stem + "ন"]
ENDINGS = {"C": "ছি ছ ছে ছেন".split(), "A": "লাম লে ল লেন".split(), "F": "ব বে বে বেন".split()}
WAS = dict(zip(PERSONS, "ছিলাম ছিলে ছিল ছিলেন".split()))
IS_NOT = dict(zip(PERSONS, "নই নও নয় নন".split()))    # the copula is zero; only its negation is a word


def conjugate(stem, tense, person, neg=False):
    """পড়, A, 1 -> পড়লাম.  A negated past is the present form with -নি: পড়িনি; the other tenses put না after."""
    present, stems, at = STEMS[stem][0].split(), STEMS[stem][1].split(), PERSONS.index(person)
    as_present = tense == "P" or tense == "A" and neg
    form = present[at] if as_present else (stems * 3)["CAF".index(tense)] + ENDINGS[tense][at]
    return form + ("" if not neg else "নি" if tense == "A" else " না")


# ---- verbs: English forms (+ particle) | light-verb noun and stem | tenses | what it takes ---------------------------
# The last column lists object nouns, place flags, or for a human object its case: acc, or genitive + postposition.
# Tenses left out are unnatural in one of the languages ("is seeing", "learned Bengali yesterday", থাকছে).
Verb = namedtuple("Verb", "base s past ing particle light stem tenses takes")


def verbs(table):
    split = [((forms.split() + [""])[:5], bengali.rpartition(" "), *rest) for forms, bengali, *rest in rows(table)]
    return {forms[0]: Verb(*forms, light, stem, tenses, takes.split(","))
            for forms, (light, _, stem), tenses, takes in split}


OBJECT_VERBS = verbs("""
read reads read reading | পড় | PCAF | book,letter,newspaper,story,poem
write writes wrote writing | লেখ | PCAF | letter,story,poem
buy buys bought buying | কেন | PCAF | shirt,sari,hat,bag,pen,umbrella,clock,chair,lamp,bicycle,car,fish,fruit,egg,mango
sell sells sold selling | বিক্রি কর | PCAF | shirt,sari,hat,bag,flower,boat,cow,goat,fish,vegetables,sweets,banana,clock
watch watches watched watching | দেখ | PCAF | film,match
listen listens listened listening to | শোন | PCAF | song,story,news,poem
eat eats ate eating | খা | PCAF | rice,fish,bread,meat,vegetables,sweets,fruit,egg,mango,banana
drink drinks drank drinking | খা | PCAF | tea,milk,water,coffee
cook cooks cooked cooking | রান্না কর | PCAF | rice,fish,meat,vegetables
bring brings brought bringing | আন | PCAF | umbrella,chair,lamp,flower,box,fruit,sweets,milk,water,bag
open opens opened opening | খোল | PCAF | door,window,shop,box
close closes closed closing | বন্ধ কর | PCAF | door,window,shop,box
clean cleans cleaned cleaning | পরিষ্কার কর | PCAF | room,house,kitchen,table,car,lamp
look looks looked looking for | খোঁজ | CAF | pen,bag,umbrella,hat,letter,clock,map,cow
draw draws drew drawing | আঁক | PCAF | picture,map,flower,bird
learn learns learned learning | শেখ | PCF | Bengali,English,history,music; sing sings sang singing | গা | PCAF | song
play plays played playing | খেল | PCAF | football,cricket,chess""")
PLACE_VERBS = verbs("""
work works worked working | কাজ কর | PCAF | work; sleep sleeps slept sleeping | ঘুমা | PCAF | sleep,tree
play plays played playing | খেল | PCAF | play,post; run runs ran running | দৌড়া | PCAF | run
walk walks walked walking | হাঁট | PCAF | walk,bank; wait waits waited waiting | অপেক্ষা কর | PCAF | wait,post,tree
swim swims swam swimming | সাঁতার কাট | PCAF | swim; talk talks talked talking | কথা বল | PCAF | talk,post,tree,bank
dance dances danced dancing | নাচ | PCAF | dance; study studies studied studying | পড়াশোনা কর | PCAF | study
live lives lived living | থাক | PF | live""")
GO_VERBS = verbs("""
go goes went going | যা | PCAF | to; come comes came coming | আস | PCAF | to
return returns returned returning | ফের | PAF | from""")
GIVE_VERBS = verbs("""
give gives gave giving | দে | PCAF | book,pen,flower,bag,umbrella,picture,sweets,fruit,money,sari
send sends sent sending | পাঠা | PCAF | letter,picture,sari,sweets,money,book,clock
show shows showed showing | দেখা | PCAF | picture,house,letter,map,car,boat,book""")
PERSON_VERBS = verbs("""
help helps helped helping | সাহায্য কর | PCAF | acc; call calls called calling | ডাক | PCAF | acc
see sees saw seeing | দেখ | PAF | acc; meet meets met meeting | দেখা কর | PAF | সঙ্গে
talk talks talked talking to | কথা বল | PCAF | সঙ্গে; wait waits waited waiting for | অপেক্ষা কর | PCAF | জন্য
look looks looked looking for | খোঁজ | CAF | acc; invite invites invited inviting | নিমন্ত্রণ কর | PAF | acc
thank thanks thanked thanking | ধন্যবাদ দে | PAF | acc; teach teaches taught teaching | পড়া | PCAF | acc
love loves loved loving | ভালোবাস | P | acc; know knows knew knowing | চেন | P | acc""")
FIXED = {"open", "close", "clean"}                    # their habitual object stays definite: "opens the shop every day"
OWNED = {"look", "open", "close", "clean", "bring", "read"}                   # verbs that go with "my", "his"
WITHIN_A_DAY = {"eat", "drink", "cook", "sleep", "open", "close", "wait"}     # not "drank tea last week", "on Monday"
LIVELY = {"play", "run", "swim", "dance"}                                     # not what a grandmother does here
AVOID = {"write": {"old"}, "draw": {"old"}, "cook": {"hot"}}                  # adjectives the verb makes absurd
DURABLE = {"car", "bicycle", "clock", "chair", "lamp", "umbrella", "box", "bag", "house", "boat",
           "shirt", "sari", "hat", "pen"}              # not bought or given daily
ADULT = {"car", "shop", "house", "boat", "horse", "cow"}     # no child's property, and seldom bought by the dozen
IN_BULK = {"buy", "sell", "bring", "give", "send"}    # the others take two, three or several: not "ate ten eggs"

# ---- nouns: English | Bengali | adjective groups ---------------------------------------------------------------------
Noun = namedtuple("Noun", "en plural bn adjectives")
ADJECTIVES = {key: pairs_of(table) for key, table in rows("""
k | red=লাল,blue=নীল,white=সাদা,black=কালো,green=সবুজ,yellow=হলুদ
w | white=সাদা,black=কালো; l | red=লাল,white=সাদা,yellow=হলুদ
n | new=নতুন,old=পুরোনো; s | big=বড়,small=ছোট; b | beautiful=সুন্দর
e | expensive=দামি,cheap=সস্তা; g | good=ভালো; f | funny=মজার; t | hot=গরম; c | cold=ঠান্ডা; r | fresh=টাটকা
p | new=নতুন,good=ভালো,famous=বিখ্যাত; q | new=নতুন,good=ভালো""")}


def plural(noun):
    return noun[:-1] + "ies" if noun[-1] == "y" else noun + ("es" if noun.endswith(("x", "ch", "o")) else "s")


NOUNS = {en: Noun(en, plural(en), bn, adjectives) for en, bn, adjectives in rows("""
book|বই|ngf; letter|চিঠি|nb; newspaper|খবরের কাগজ|n; story|গল্প|ngfb; poem|কবিতা|ngb; film|সিনেমা|ngf; match|খেলা|g
song|গান|ngb; picture|ছবি|nbs; map|মানচিত্র|ns; flower|ফুল|lb; shirt|জামা|kneb; sari|শাড়ি|kneb; hat|টুপি|kne
bag|ব্যাগ|knse; umbrella|ছাতা|kns; clock|ঘড়ি|nsb; chair|চেয়ার|kns; table|টেবিল|ns; lamp|বাতি|ns; pen|কলম|kne
box|বাক্স|kns; bicycle|সাইকেল|kne; car|গাড়ি|knse; boat|নৌকা|nsb; house|বাড়ি|nsb; door|দরজা|s; window|জানালা|s
room|ঘর|s; shop|দোকান|ns; kitchen|রান্নাঘর|s; tree|গাছ|sb; egg|ডিম|r; mango|আম|s; banana|কলা|s; cow|গরু|ws
dog|কুকুর|ws; cat|বিড়াল|ws; goat|ছাগল|ws; bird|পাখি|wsb; horse|ঘোড়া|wsb; doctor|ডাক্তার|p; teacher|শিক্ষক|p
engineer|ইঞ্জিনিয়ার|p; lawyer|উকিল|p; artist|শিল্পী|p; journalist|সাংবাদিক|p; guest|অতিথি|; student|ছাত্র|q
friend|বন্ধু|q; brother|ভাই|; sister|বোন|""")}
NOUNS |= {en: Noun("the news" if en == "news" else en, "", bn, adjectives) for en, bn, adjectives in rows("""
rice|ভাত|t; fish|মাছ|r; bread|রুটি|t; meat|মাংস|; vegetables|সবজি|r; sweets|মিষ্টি|; fruit|ফল|r; tea|চা|t; milk|দুধ|tc
water|জল|c; coffee|কফি|t; money|টাকা|; news|খবর|; Bengali|বাংলা|; English|ইংরেজি|; history|ইতিহাস|; music|সঙ্গীত|
football|ফুটবল|; cricket|ক্রিকেট|; chess|দাবা|""")}
PROFESSIONS = ["doctor", "teacher", "engineer", "lawyer", "artist", "journalist"]
FAMILIAR = {"student", "friend", "brother", "sister"}      # counted with -জন, but their verb is familiar
PEOPLE = {*PROFESSIONS, "guest", *FAMILIAR}
GOODS = ("shirt hat bag pen umbrella clock chair lamp bicycle car book house boat shop table "
         "cow dog cat goat horse").split()
NUMBERS = pairs_of("two=দু,three=তিন,four=চার,five=পাঁচ,six=ছয়,seven=সাত,ten=দশ,several=কয়েক")
VOWELS = "অআইঈউঊঋএঐওঔািীুূৃেৈোৌ"


def genitive(noun):
    """-র after a vowel, -এর after a consonant; মায়ের and ভাইয়ের with a glide."""
    return noun + ("য়ের" if noun.endswith((" মা", "-মা", "ভাই")) else "র" if noun[-1] in VOWELS else "ের")


def locative(noun):
    """-এ after a consonant, -য় after আ, -তে after the other vowels."""
    return noun + ("য়" if noun[-1] == "া" else "তে" if noun[-1] in VOWELS else "ে")


# ---- subjects --------------------------------------------------------------------------------------------------------
POSSESSIVE = {"I": "my", "we": "our", "you": "your", "he": "his", "she": "her", "they": "their"}
OBJECTIVE = {"I": "me", "we": "us", "he": "him", "she": "her", "they": "them"}


class Subject(namedtuple("Subject", "en bn person number pron voc voc_bn", defaults=("", "", ""))):
    """number: I, sg or pl, for the English verb; pron: the English pronoun that takes the noun up; voc: vocative."""

    many = property(lambda self: self.number != "sg")
    several = property(lambda self: self.many and self.bn not in ("আমি", "তুমি", "আপনি"))   # one "you" is not
    young = property(lambda self: {self.en.split()[-1], self.voc} & {*"boy girl boys girls children students".split()})
    objective = property(lambda self: OBJECTIVE.get(self.en, self.en))

    def be(self, was=False):
        return {"I": "am was", "sg": "is was", "pl": "are were"}[self.number].split()[was]

    def case(self, which):
        """The genitive (0) or accusative (1) of the Bengali; they are alike in a plural in -রা."""
        if self.bn in CASES:
            return CASES[self.bn][which]
        return self.bn[:-2] + "দের" if self.bn.endswith("রা") else self.bn + "কে" if which else genitive(self.bn)

    def pronoun(self):
        """The Bengali pronoun that takes the subject up again, with its politeness and number: তিনি after শিক্ষক."""
        known = {"3sg": "সে", "3pl": "তারা", "Hsg": "তিনি", "Hpl": "তাঁরা"}
        return self.bn if self.bn in CASES else known[self.person + self.number]


CASES = {name: cells for name, *cells in rows("""
আমি|আমার|আমাকে; আমরা|আমাদের|আমাদের; তুমি|তোমার|তোমাকে; তোমরা|তোমাদের|তোমাদের; আপনি|আপনার|আপনাকে
আপনারা|আপনাদের|আপনাদের; সে|তার|তাকে; তারা|তাদের|তাদের; তিনি|তাঁর|তাঁকে; তাঁরা|তাঁদের|তাঁদের""")}
GROUPS = ["1", "2", "2H", "3", "H"]                      # the persons, with 2 split by politeness
SUBJECTS = {"1": [Subject("I", "আমি", "1", "I", "I"), Subject("we", "আমরা", "1", "pl", "we")]}
for group, table in {"3": """
he|সে|he; she|সে|she; they|তারা|they; the boy|ছেলেটি|he; the girl|মেয়েটি|she; the boys|ছেলেরা|they
the girls|মেয়েরা|they; the children|বাচ্চারা|they; the students|ছাত্ররা|they; my brother|আমার ভাই|he
my sister|আমার বোন|she; my friend|আমার বন্ধু|he; Rina|রিনা|she; Mina|মিনা|she; Ratan|রতন|he; Tapan|তপন|he""", "H": """
my father|আমার বাবা|he; my mother|আমার মা|she; my grandfather|আমার দাদু|he; my grandmother|আমার দিদিমা|she
my uncle|আমার কাকা|he; my aunt|আমার মাসি|she; my parents|আমার বাবা-মা|they; the teacher|শিক্ষক|he
the teachers|শিক্ষকরা|they; the doctor|ডাক্তার|she; the doctors|ডাক্তাররা|they; the farmer|কৃষক|he
the guests|অতিথিরা|they; Mr Sen|সেনবাবু|he; Mrs Roy|মিসেস রায়|she"""}.items():
    SUBJECTS[group] = [Subject(en, bn, group, "pl" if pron == "they" else "sg", pron) for en, bn, pron in rows(table)]
for group, table in {"2": """
Rina|রিনা|তুমি; Mina|মিনা|তুমি; Ratan|রতন|তুমি; Tapan|তপন|তুমি; my friend|বন্ধু|তুমি; children|বাচ্চারা|তোমরা
boys|ছেলেরা|তোমরা; girls|মেয়েরা|তোমরা; friends|বন্ধুরা|তোমরা""", "2H": """
sir|স্যার|আপনি; madam|ম্যাডাম|আপনি; doctor|ডাক্তারবাবু|আপনি; Mr Sen|সেনবাবু|আপনি; Mrs Roy|মিসেস রায়|আপনি
gentlemen|ভদ্রমহোদয়গণ|আপনারা; dear guests|প্রিয় অতিথিরা|আপনারা
respected teachers|শ্রদ্ধেয় শিক্ষকরা|আপনারা"""}.items():
    SUBJECTS[group] = [Subject("you", bn, group[-1], "pl", "you", voc, voc_bn) for voc, voc_bn, bn in rows(table)]
ANIMALS = [Subject("the " + word, NOUNS[name].bn + end, "3", number, "it")
           for name in ("dog", "cat", "cow", "goat", "horse")
           for word, end, number in ((name, "টা", "sg"), (plural(name), "গুলো", "pl"))]
WHO = Subject("who", "", "3", "sg")
PARTS = [{"my parents", "my father"}, {"my parents", "my mother"}, {"he", "she"}]     # not subject and object at once


def odd(subject, verb):
    """Not said here: grandparents at play, children at work or teaching, guests, teachers or doctors selling."""
    return (verb.base in LIVELY and subject.en in ("my grandfather", "my grandmother") or
            verb.base in ("work", "teach", "sell") and subject.young or verb.base == "sell" and
            (subject.voc or subject.en).split()[-1] in ("guests", "teacher", "teachers", "doctor", "doctors"))


# ---- places and times ------------------------------------------------------------------------------------------------
# The flags say what is done there; "go" and "far" are destinations.
Place = namedtuple("Place", "en at bn flags")
PLACES = [Place(*cells, flags.split()) for *cells, flags in rows("""
school|at|স্কুল|go wait study work; college|at|কলেজ|go study work; the office|at|অফিস|go work wait
the hospital|at|হাসপাতাল|go work wait; the bank|at|ব্যাংক|go work wait; the library|in|লাইব্রেরি|go study work
the market|at|বাজার|go wait talk work buy; the shop|at|দোকান|go work wait buy; the station|at|স্টেশন|go wait
the factory|in|কারখানা|work; the museum|in|জাদুঘর|go work wait; the temple|at|মন্দির|go wait
the hotel|in|হোটেল|go work sleep wait; the garden|in|বাগান|play walk talk work
the park|in|পার্ক|go play walk run dance talk
the field|in|মাঠ|go play run work; the street|in|রাস্তা|walk run play; the room|in|ঘর|sleep study dance talk
the kitchen|in|রান্নাঘর|talk work; the roof|on|ছাদ|sleep walk dance play; the river|in|নদী|swim; the pond|in|পুকুর|swim
the sea|in|সমুদ্র|swim; the village|in|গ্রাম|go live work; the city|in|শহর|go live work; Dhaka|in|ঢাকা|far live
Kolkata|in|কলকাতা|far live; Delhi|in|দিল্লি|far live; Puri|in|পুরী|far live; home|at|বাড়ি|sleep study work""")]
WITH_FLAG = {flag: [place for place in PLACES if flag in place.flags] for place in PLACES for flag in place.flags}
BY = {"go": [("by bus", "বাসে"), ("by bicycle", "সাইকেলে"), ("by rickshaw", "রিকশায়"), ("on foot", "পায়ে হেঁটে")],
      "far": [("by bus", "বাসে"), ("by train", "ট্রেনে"), ("by car", "গাড়িতে"), ("by plane", "প্লেনে")]}
# Present habits; Month: habits too rare for "every day"; then the other tenses.  ~ puts the adverb before the verb.
TIMES = {key: list(pairs_of(table).items()) for key, table in rows("""
P | every day=প্রতিদিন,every morning=প্রতিদিন সকালে,every evening=প্রতিদিন সন্ধ্যায়,on Sundays=প্রতি রবিবার,\
~often=প্রায়ই,~sometimes=মাঝে মাঝে,~usually=সাধারণত,~always=সবসময়
Month | every month=প্রতি মাসে,every year=প্রতি বছর,~often=প্রায়ই,~sometimes=মাঝে মাঝে
C | now=এখন,today=আজ
A | yesterday=গতকাল,last night=গতকাল রাতে,this morning=আজ সকালে,last week=গত সপ্তাহে,on Monday=সোমবার,on Friday=শুক্রবার
F | tomorrow=আগামীকাল,tonight=আজ রাতে,tomorrow morning=আগামীকাল সকালে,next week=আগামী সপ্তাহে,\
soon=শীঘ্রই,on Sunday=রবিবার""")}
EXISTENCE = [(en, bn, names.split(",")) for en, bn, names in rows("""
in the room|ঘরে|chair,table,lamp,clock,box,picture,guest,cat; in the kitchen|রান্নাঘরে|table,chair,lamp,window,cat
in the garden|বাগানে|tree,flower,bird,chair,goat; in the field|মাঠে|cow,goat,horse,tree,bird
in the village|গ্রামে|house,shop,teacher,doctor,artist; in the hospital|হাসপাতালে|doctor,window,chair
in the school|স্কুলে|teacher,student,door; in the bag|ব্যাগে|book,pen,letter,umbrella,map
in the box|বাক্সে|letter,shirt,sari,egg,mango,hat; on the table|টেবিলের উপর|book,pen,lamp,letter,banana,egg,newspaper
under the tree|গাছের নিচে|dog,cat,cow,bicycle,chair; in front of the house|বাড়ির সামনে|car,bicycle,tree,dog
behind the shop|দোকানের পিছনে|house,tree,cat,car; near the station|স্টেশনের কাছে|shop,house,tree,car
on the roof|ছাদে|bird,cat,chair,table; by the river|নদীর ধারে|house,boat,tree,cow,bird
in the hotel|হোটেলে|guest,room,artist,journalist; in the office|অফিসে|engineer,lawyer,journalist,table,clock
in the city|শহরে|lawyer,artist,doctor,engineer; in the library|লাইব্রেরিতে|book,map,newspaper,student,chair
in the street|রাস্তায়|car,dog,shop,horse""")]
STATES = pairs_of("tired=ক্লান্ত,happy=খুশি,ill=অসুস্থ,busy=ব্যস্ত,hungry=ক্ষুধার্ত,thirsty=তৃষ্ণার্ত")
TRAITS = pairs_of("honest=সৎ,famous=বিখ্যাত,brave=সাহসী,kind=দয়ালু,strong=শক্তিশালী,poor=গরিব,rich=ধনী,healthy=সুস্থ")
# What one does, or with "not" does not do, in a state, with a place flag or objects.
REASONS = {state: [what.split() for what in table.split(",")] for state, table in rows("""
tired | sleep sleep,drink tea/coffee,play football/cricket not,go go not,work work not,walk walk not
happy | sing song,dance dance,buy flower/sweets/sari,bring sweets/flower
ill | go go not,eat fish/meat/sweets not,drink milk/water,swim swim not,play football/cricket not,work work not
busy | come go not,watch film/match not,cook fish/meat not,clean room/house/kitchen not,play chess/cricket not
hungry | eat rice/fish/bread/egg/fruit/banana,cook rice/fish/meat/vegetables,buy fruit/egg/mango/fish,bring fruit/sweets
thirsty | drink water/milk/tea,bring water/milk,buy milk/coffee/fruit""")}
ALL_VERBS = {**PLACE_VERBS, **GIVE_VERBS, **GO_VERBS, **OBJECT_VERBS}         # "play" is the one with an object here


class Grammar:
    """Builds phrases and clauses, each as (English, Bengali), with every choice taken from one random generator."""

    def __init__(self):
        self.rng, self.cycles = random.Random(SEED), {}
        self.pick = self.rng.choice

    def chance(self, p):
        return self.rng.random() < p

    def cell(self, name, *axes):
        """The next cell of a shuffled round through the product of the axes: rare cells come as often as others."""
        if not self.cycles.get(name):
            self.cycles[name] = list(itertools.product(*axes))
            self.rng.shuffle(self.cycles[name])
        return self.cycles[name].pop()

    # ---- phrases
    def noun(self, name, det, p=0.4, avoid=(), owner=None):
        """A noun with its determiner: a, a number, how many, any, no; the, this, that, these; or one of
        bare (books), plural (the books), mass (tea), own (his book, if the owner is a man).

        Counted nouns take -জন for people, -টি for the rest; definite ones -টা, plural -গুলো.  p: of an adjective."""
        noun, number = NOUNS[name], {"a": "এক", "how many": "কয়", **NUMBERS}.get(det)
        adjectives = [pair for key in noun.adjectives for pair in ADJECTIVES[key].items() if pair[0] not in avoid]
        adj, adj_bn = self.pick(adjectives) if adjectives and self.chance(p) else ("", "")
        end = {"these": "গুলো", "plural": "গুলো"}.get(det, "টা" if det in ("the", "this", "that", "own") else "")
        en = join(adj, noun.en if end == "টা" or det in ("a", "mass") else noun.plural)
        det_bn = (number + ("জন" if name in PEOPLE else "টি") if number else
                  {"this": "এই", "that": "ওই", "these": "এই", "any": "কোনো", "no": "কোনো"}.get(det, ""))
        if det == "own":
            who = owner if owner and owner != WHO else SUBJECTS["1"][0]
            det, det_bn = POSSESSIVE[who.pron], CASES[who.pronoun()][0]
        det = {"a": "an" if en[0] in "aeiou" else "a", "bare": "", "mass": "", "plural": "the"}.get(det, det)
        return join(det, en), join(det_bn, adj_bn, noun.bn + end)

    def thing(self, verb, tense, neg, subject, name=None, p=0.4):
        """An object for the verb.  Habits take bare plurals; a negated verb, no "a" or number (whose scope?)."""
        fixed, avoid = verb.base in FIXED, AVOID.get(verb.base, ())
        name = name or self.pick([noun for noun in verb.takes
                                  if tense != "P" or fixed or verb.base == "sell" or noun not in DURABLE])
        if not NOUNS[name].plural:
            return self.noun(name, "mass", p * 0.7, avoid)
        if tense == "P" and not fixed:
            return self.noun(name, "bare", p * 0.6, avoid)
        if not neg and not fixed and self.chance(0.5):
            numbers = ([] if tense == "C" or verb.base == "look" or name in ADULT or name == "bicycle" else
                       NUMBERS if verb.base in IN_BULK else ["two", "three", "several"])
            return self.noun(name, self.pick(["a", "a", "a", *numbers]), p, avoid)
        own = verb.base in OWNED and name != "flower" and not (subject and subject.young and name in ADULT)
        kinds = (["the", "plural"] if verb.base in ("write", "draw") else            # "this" would be there already
                 ["the"] if name == "kitchen" else
                 ["the", "the", "this", "that", "these", "plural"] + ["own"] * 3 * own)
        return self.noun(name, self.pick(kinds), p, avoid, subject)

    def subject(self, group=None):
        return self.pick(SUBJECTS[group or self.pick(GROUPS)])

    def other(self, subject, verb=""):
        """A second person in the sentence.  "you" needs the vocative for itself, so it comes with I and we only."""
        while True:
            other = self.subject(self.pick(["1", "2", "2H", "3", "3", "H", "H"]))
            # One loves children, or within the family.
            family = other.en.startswith("my ") and (subject.person == "1" or subject.en.startswith("my "))
            if not (verb == "teach" and (not other.young or other.voc) or
                    verb == "love" and not other.young and not family or
                    other.en == "you" and subject.person != "1" or other.person == subject.person == "1" or
                    other.en == subject.en or {other.en, subject.en} in PARTS or
                    subject.voc and other.en.split()[-1] == subject.voc.split()[-1]):    # Doctor, you ... the doctor
                return other

    def place(self, flag):
        """Where something happens: a locative, or a genitive with a postposition."""
        if flag in ("tree", "bank"):
            return ("under the tree", "গাছের নিচে") if flag == "tree" else ("by the river", "নদীর ধারে")
        if flag == "post":
            place = self.pick([p for p in WITH_FLAG["go"] if p.en.startswith("the ") and "live" not in p.flags])
            en, bn = self.pick([("in front of", "সামনে"), ("behind", "পিছনে"), ("near", "কাছে")])
            return f"{en} {place.en}", f"{genitive(place.bn)} {bn}"
        place = self.pick(WITH_FLAG[flag])
        return f"{place.at} {place.en}", locative(place.bn)

    def goal(self, verb, *flags):
        place = self.pick([place for flag in flags for place in WITH_FLAG[flag]])
        return f"{verb.takes[0]} {place.en}", place.bn + " থেকে" if verb.base == "return" else locative(place.bn)

    def time(self, tense, base="", p=None, plain=False):
        """A time phrase, always with present and past (see the rule at the top).  plain: not "often", not "soon"."""
        if not self.chance({"P": 1, "C": 0.5, "A": 1, "F": 0.8}[tense] if p is None else p):
            return "", ""
        rare = tense == "P" and base in ("far", "give", "send", "show", "invite", "thank")
        return self.pick([t for t in TIMES["Month" if rare else tense] if not (
            plain and (t[0][0] == "~" or t[0] == "soon") or
            base == "sleep" and t[0] == "every morning" or
            base in WITHIN_A_DAY and ("week" in t[0] or t[0].startswith("on ")))])

    # ---- clauses
    def clause(self, subject, verb, tense, rest, time=("", ""), neg=False, ask="", wh_bn="", part=False):
        """One clause.  ask: "yn" or the English wh-word, and wh_bn its Bengali.  part: of a longer sentence."""
        if tense not in verb.tenses or odd(subject, verb) or (
                ask and subject.person == "1" and (tense != "F" or subject.en == "I")):     # "Am I eating fish?"
            return None
        aux = {"P": "do" if subject.many else "does", "C": subject.be(), "A": "did", "F": "will"}[tense]
        main, question = verb.ing if tense == "C" else verb.base, ask and subject != WHO
        if tense in "PA" and not neg and not question:          # no do-support: the verb itself carries the tense
            aux, main = "", verb.past if tense == "A" else verb.base if subject.many else verb.s
        early, late = (time[0][1:], "") if time[0].startswith("~") else ("", time[0])
        core = join(aux, subject.en) if question else join(subject.en, aux)
        en = join(ask if question and ask != "yn" else "", core, "not" if neg else "", early, main, verb.particle,
                  rest[0], late)
        # The wh-word follows a definite object and a place, but a bare or counted object stays at its verb.
        asked = [rest[1], wh_bn] if ask == "what" or rest[1].endswith(("টা", "গুলো")) else [wh_bn, rest[1]]
        bn = join(subject.bn, "কি" if ask == "yn" else "", time[1], *asked, verb.light,
                  conjugate(verb.stem, tense, subject.person, neg))
        return (en, bn) if part else finish(subject, en, bn, ask)

    def mood(self):                                             # (negated, asked): mostly plain statements
        return self.pick([(False, "")] * 4 + [(True, ""), (True, ""), (False, "yn")])

    # ---- the template families; each docstring says what to look for in an attention map
    def statement(self, family="statement", neg=False, ask=""):
        """SVO against SOV: the verb's arc crosses."""
        name, group, tense = self.cell(family, OBJECT_VERBS, GROUPS, TENSES)
        verb, subject = OBJECT_VERBS[name], self.subject(group)
        time = self.time(tense, name, 0.6 if ask else None, plain=neg)
        return self.clause(subject, verb, tense, self.thing(verb, tense, neg, subject), time, neg, ask)

    negation = partialmethod(statement, "negation", neg=True)           # "did not" becomes -নি at the end
    yes_no = partialmethod(statement, "yes_no", ask="yn")               # আপনি looks at the vocative

    def wh(self):
        """The wh-word moves from the front to the verb, or to the bare noun before it."""
        word, name, tense = self.cell("wh", ["what", "where", "when", "why", "who", "how many"], OBJECT_VERBS, TENSES)
        verb, subject, rest = OBJECT_VERBS[name], WHO if word == "who" else self.subject(), ("", "")
        time, neg = self.time(tense, name, None if word == "who" else 0.6, plain=True), False
        wh_bn = {"what": "কী", "where": "কোথায়", "when": "কখন", "why": "কেন", "who": "কে"}.get(word)
        if word == "what":
            if name in ("drink", "sing", "listen", *FIXED):
                return None
            rest = self.place("buy") if name in ("buy", "sell") and self.chance(0.5) else rest
        elif word == "how many":
            if name not in ("buy", "sell", "read", "write", "bring", "draw", "eat") or tense not in "AF":
                return None
            word, wh_bn = self.noun(self.pick([n for n in verb.takes if NOUNS[n].plural]), word, 0.4,
                                       AVOID.get(name, ()))
        elif word == "when" and tense == "C" or word == "where" and name in FIXED:
            return None
        else:
            rest = self.thing(verb, tense, word != "who", subject)
            time = ("", "") if word in ("where", "when") else time
            neg = word == "why" and self.chance(0.3)
        return self.clause(subject, verb, tense, rest, time, neg, word, wh_bn)

    def motion(self):
        """to, from, by, with are endings and postpositions."""
        name, group, tense = self.cell("motion", GO_VERBS, GROUPS, TENSES)
        verb, subject, kind = GO_VERBS[name], self.subject(group), "far" if self.chance(0.25) else "go"
        en, bn = self.goal(verb, kind)
        extra, other = self.pick(["", "by", "with", "house"]), self.other(subject)
        if extra == "by":
            by, by_bn = self.pick(BY[kind])
            en, bn = f"{en} {by}", f"{by_bn} {bn}"
        elif extra == "with":
            en, bn = f"{en} with {other.objective}", f"{other.case(0)} সঙ্গে {bn}"
        elif extra == "house" and name != "return":
            if (other.en in POSSESSIVE or other.number == "pl" or other.en in ("my father", "my mother") or
                    subject.en.startswith("my grand") and other.en.startswith("my grand")):
                return None
            en, bn, kind = f"to {other.en}'s house", f"{other.case(0)} বাড়িতে", "go"
        neg, ask = self.mood()
        return other.en != "you" and self.clause(subject, verb, tense, (en, bn), self.time(tense, kind, plain=neg), neg,
                                                 ask)

    def at_place(self):
        """ "in" and "at" have no word: they look at the ending."""
        name, group, tense = self.cell("at_place", PLACE_VERBS, GROUPS + ["animal"], TENSES)
        verb, animal = PLACE_VERBS[name], group == "animal"
        subject, flag = self.pick(ANIMALS) if animal else self.subject(group), self.pick(verb.takes)
        if animal:
            flag = {"sleep": self.pick(["tree", "post"]), "run": "run"}.get(name) if tense != "F" else ""
        if not flag or name == "play" and subject.person == "H" or name == "talk" and not subject.several:
            return None
        neg, ask = self.mood()
        time = ("", "") if name == "live" else self.time(tense, "sleep" if animal else name, plain=neg)
        return self.clause(subject, verb, tense, self.place(flag), time, neg, ask)

    def to_person(self, family="to_person", verbs=PERSON_VERBS):
        """The verb chooses the case."""
        name, group, tense = self.cell(family, verbs, GROUPS + ["1"], TENSES)
        verb, subject, (neg, ask) = verbs[name], self.subject(group), self.mood()
        other, giving = self.other(subject, name), family == "giving"
        en, bn = self.thing(verb, tense, neg, subject) if giving else ("", "")
        after = "" if giving or verb.takes == ["acc"] else verb.takes[0]
        rest = join(other.objective, en), join(other.case(0 if after else 1), after, bn)
        subject = subject._replace(voc=subject.voc or other.voc, voc_bn=subject.voc_bn or other.voc_bn)
        time = ("", "") if name in ("love", "know") else self.time(tense, name, plain=neg)
        return self.clause(subject, verb, tense, rest, time, neg, ask)

    giving = partialmethod(to_person, "giving", GIVE_VERBS)             # -কে: who gets it

    def possession(self):
        """The owner is a genitive, "has" is আছে."""
        group, form, was = self.cell("possession", GROUPS, ["has", "has", "not", "any", "how many"],
                                     [False, False, True])
        subject, name = self.subject(group), self.pick(GOODS + ["brother", "sister", "friend"])
        numbers = ["two", "three"] if name in ("brother", "sister") else ["a", "a", *NUMBERS]
        det = {"has": self.pick(numbers), "not": "any"}.get(form, form)
        ask, neg, many = form in ("any", "how many"), form == "not", subject.many
        if name in FAMILIAR and (was or det == "a" or name in subject.en + subject.voc) or (
                ask and group == "1" or name in ADULT and subject.young):
            return None
        en, bn = self.noun(name, det)
        aux = "did" if was else "do" if many else "does"
        has = f"{aux} not have" if neg else "had" if was else "have" if many else "has"
        text = {"any": f"{aux} {subject.en} have {en}", "how many": f"{en} {aux} {subject.en} have"}.get(
            form, f"{subject.en} {has} {en}")
        end = ("ছিল না" if was else "নেই") if neg else "ছিল" if was else "আছে"
        return finish(subject, text, join(subject.case(0), "কি" if form == "any" else "", bn, end), ask)

    def copula(self):
        """No "is"; but "is not" agrees: নই নও নয় নন."""
        kind, group, was, neg = self.cell("copula", ["quality", "quality", "profession", "thing", "thing"], GROUPS,
                                          [False, False, True], [False, True])
        subject, time, degree = self.subject(group), ("", ""), not neg and self.chance(0.35)
        ask = not neg and self.chance(0.3) and (group != "1" or kind == "thing")
        if kind == "quality":
            en, bn = self.pick([*STATES.items(), *TRAITS.items()])
            if neg and en in ("honest", "kind"):                              # "Sir, you are not honest"
                return None
            if en in STATES and self.chance(0.6):
                time = ("yesterday", "গতকাল") if was else ("today", "আজ")
        elif kind == "profession":
            if was or subject.young or subject.en.startswith("the ") or subject.voc.split(" ")[-1] in (
                    "doctor", "teachers", "guests"):
                return None
            en, bn = self.noun(self.pick(PROFESSIONS), "bare" if subject.several else "a", 0.3 * (not neg))
            bn, degree = bn.removeprefix("একজন ") if neg else bn, False       # শিক্ষক নই: negated, it is not counted
        else:
            name = self.pick([n for n in [*GOODS, "story", "poem", "film", "song", "picture"] if
                              len(NOUNS[n].adjectives) > 1 and "w" not in NOUNS[n].adjectives])
            en, bn = self.pick([pair for key in NOUNS[name].adjectives for pair in ADJECTIVES[key].items()])
            if name in ADULT and subject.young:
                return None
            colours, number = ADJECTIVES["k"], "sg"
            degree = degree and en not in colours
            if subject.en in POSSESSIVE:
                owned = self.noun(name, "own", 0, owner=subject)
            elif self.chance(0.5):                                # the red bag is cheap: one adjective in, one out
                det = self.pick(["the", "this", "that", "these", "plural"])
                red = self.chance(0.6) and en not in colours and "k" in NOUNS[name].adjectives
                owned = self.noun(name, det, red, set().union(*ADJECTIVES.values()) - set(colours))
                number = "pl" if det in ("these", "plural") else "sg"
            else:
                ending = "'" if subject.en.endswith("s") and subject.number == "pl" else "'s"
                owned = f"{subject.en}{ending} {name}", f"{subject.case(0)} {NOUNS[name].bn}টা"
            subject = Subject(*owned, "3", number, "", subject.voc, subject.voc_bn)
        en, bn = (f"very {en}", f"খুব {bn}") if degree else (en, bn)
        core = join(subject.be(was), subject.en) if ask else join(subject.en, subject.be(was))
        end = WAS[subject.person] + " না" * neg if was else IS_NOT[subject.person] if neg else ""
        return finish(subject, join(core, "not" if neg else "", en, time[0]),
                      join(subject.bn, "কি" if ask else "", time[1], bn, end), ask)

    def existence(self):
        """People count with -জন, and polite ones take আছেন."""
        (place, place_bn, names), form, was = self.cell(
            "existence", EXISTENCE, ["is", "is", "is", "no", "any", "how many"], [False, False, True])
        name, det = self.pick(names), self.pick(["a", *NUMBERS]) if form == "is" else form
        en, bn = self.noun(name, det)
        be = ("was" if det == "a" else "were") if was else "is" if det == "a" else "are"
        polite = "েন" if name in PEOPLE - FAMILIAR else ""
        have = "ছিল" + polite if was else "আছ" + (polite or "ে")
        have = (have + " না" if was else "নেই") if form == "no" else have
        text = {"any": f"{be} there {en} {place}", "how many": f"{en} {be} there {place}"}.get(
            form, f"there {be} {en} {place}")
        return finish(WHO, text, join(place_bn, "কি" if form == "any" else "", bn, have), form in ("any", "how many"))

    def infinitive(self):
        """ "has to": the subject turns accusative."""
        modal, name, group = self.cell("infinitive", ["want", "not want", "can", "cannot", "like", "have"],
                                       [*OBJECT_VERBS, *GO_VERBS, "swim", "sleep", "work", "study"], GROUPS)
        verb, subject, neg = ALL_VERBS[name], self.subject(group), "not" in modal
        if modal == "like" and name in ("look", "open", "close", "bring", "come", "return", "go", "sell") or (
                modal in ("can", "cannot") and name == "look" or odd(subject, verb)):
            return None
        rest = (self.thing(verb, "P" if modal == "like" else "F", neg, subject) if name in OBJECT_VERBS else
                self.goal(verb, "go", "far") if name in GO_VERBS else self.place(verb.takes[0]))
        ask = (modal in ("can", "have") or modal == "want" and group != "1") and self.chance(0.35)
        time = self.time("F", name, 0.4, plain=True) if modal in ("want", "have", "cannot") else ("", "")
        base, do = join(verb.base, verb.particle, rest[0], time[0]), "do" if subject.many else "does"
        if modal in ("can", "cannot"):
            text = join(modal, subject.en, base) if ask else join(subject.en, modal, base)
        elif ask or neg:
            text = f"{do} {subject.en} {modal} to {base}" if ask else f"{subject.en} {do} not want to {base}"
        else:
            text = join(subject.en, modal if subject.many else {"have": "has"}.get(modal, modal + "s"), "to", base)
        stem = {"can": "পার", "cannot": "পার", "like": "ভালোবাস"}.get(modal, "চা")
        # "cannot come tomorrow" is a future in Bengali: পারব না.
        tense = "F" if modal == "cannot" and time[0] else "P"
        who, end = ((subject.case(1), "হবে") if modal == "have" else
                    (subject.bn, conjugate(stem, tense, subject.person, neg)))
        return finish(subject, text, join(who, "কি" if ask else "", time[1], rest[1], verb.light, STEMS[verb.stem][2],
                                          end), ask)

    def imperative(self):
        """The ending looks at the vocative: পড়ো, পড়ুন; এসো, আসুন."""
        name, group = self.cell("imperative", [*OBJECT_VERBS, *GIVE_VERBS, "go", "come", "wait", "work", "study",
                                               "sleep"], ["2", "2H"])
        polite = group == "2H"
        verb, subject, please = ALL_VERBS[name], self.subject(group), self.chance(0.8 if polite else 0.4)
        if odd(subject, verb) or name == "sell":
            return None
        neg = polite and name != "learn" and self.chance(0.25)             # a familiar "do not" has forms of its own
        if name in GIVE_VERBS:
            other, (en, bn) = self.other(subject), self.thing(verb, "F", neg, None)
            rest = join(other.objective, en), join(other.case(1), bn)
        else:
            rest = (self.thing(verb, "F", neg, None) if name in OBJECT_VERBS else
                    self.goal(verb, "go") if name in GO_VERBS else self.place(self.pick(verb.takes)))
        # The familiar imperative has a future of its own (পোড়ো, কোরো), so it gets no "tomorrow".
        time = self.time("F", name, 0.3, plain=True) if polite and name != "learn" else ("", "")
        form = (conjugate(verb.stem, "F", "H", True) if neg else STEMS[verb.stem][3] if polite else
                "এসো" if name == "come" else conjugate(verb.stem, "P", "2"))
        en = join("please" if please else "", "do not" if neg else "", verb.base, verb.particle, rest[0], time[0])
        return finish(subject, en, join("দয়া করে" if please else "", time[1], rest[1], verb.light, form), False)

    def reference(self):
        """ "she" and তিনি look at the doctor."""
        group, state, form = self.cell("reference", ["1", "3", "3", "H", "H"], REASONS, ["so", "so", "because"])
        subject, (name, what, *neg) = self.subject(group), self.pick(REASONS[state])
        verb, again, neg = ALL_VERBS[name], subject._replace(en=subject.pron, bn=subject.pronoun()), bool(neg)
        tense = "A" if form == "because" else self.pick("CF")
        if name in OBJECT_VERBS:
            what = self.pick(what.split("/"))
            rest = (self.noun(what, "bare", 0.2) if what in ("egg", "mango", "banana", "flower") else
                    self.thing(verb, tense, neg, subject, what, 0.3 * (state not in ("ill", "thirsty"))))
        else:
            rest = self.goal(verb, what) if name in GO_VERBS else self.place(what)
        time = self.time(tense, "sleep", {"F": 0.5 * (state in ("ill", "busy")), "C": 0, "A": 1}[tense], plain=True)
        if odd(subject, verb):
            return None
        en, bn = self.clause(again if form == "so" else subject, verb, tense, rest, time, neg, part=True)
        if form == "so":
            return finish(subject, f"{subject.en} {subject.be()} {state}, so {en}",
                          f"{subject.bn} {STATES[state]}, তাই {bn}", False)
        return finish(subject, f"{en} because {again.en} {subject.be(True)} {state}",
                      f"{bn}, কারণ {again.bn} {STATES[state]} {WAS[subject.person]}", False)


FAMILIES = {"statement": 950, "negation": 750, "yes_no": 750, "wh": 800, "motion": 750, "at_place": 750, "giving": 750,
            "to_person": 750, "possession": 700, "copula": 750, "existence": 700, "infinitive": 800, "imperative": 700,
            "reference": 750}
MIN_ENGLISH, MIN_BENGALI = 20, 8       # a word seen more seldom than this in the corpus cannot be asked of the model


def words(text):
    return re.findall(r"[^\s.,?।]+", text.lower())


def is_rare(pair, counts):
    return any(count[word] < least for count, side, least in zip(counts, pair, (MIN_ENGLISH, MIN_BENGALI))
               for word in words(side))


def build():
    """[(family, English, Bengali)]: each family sampled to its quota, then topped up where a word is rare."""
    grammar, seen, pairs, counts = Grammar(), set(), [], [Counter(), Counter()]

    def draw(family, only_rare=False):
        pair = getattr(grammar, family)()
        # One English for one Bengali too: he and she are both সে, so whichever comes first keeps the sentence.
        if not pair or seen & {*pair} or not 3 <= len(words(pair[0])) <= 12 or only_rare and not is_rare(pair, counts):
            return False
        seen.update(pair)
        pairs.append((family, *pair))
        for count, side in zip(counts, pair):
            count.update(words(side))
        return True

    for family, left in FAMILIES.items():
        while left:
            left -= draw(family)
    for _ in range(12000):
        for family in FAMILIES:
            draw(family, only_rare=True)
    # Forms that stay rare (deep corners of the paradigm) go, with their sentences; that may make others rare.
    while rare := {pair for pair in pairs if is_rare(pair[1:], counts)}:
        pairs = [pair for pair in pairs if pair not in rare]
        counts = [Counter(word for pair in pairs for word in words(pair[at])) for at in (1, 2)]
    grammar.rng.shuffle(pairs)
    return pairs, counts


def check(pairs, counts):
    """What training and the tests rely on.  A failure names the sentence."""
    assert len(pairs) >= 8000 and min(map(len, counts)) >= 250, (len(pairs), *map(len, counts))
    assert len({en for _, en, _ in pairs}) == len(pairs), "an English sentence twice"
    for _, en, bn in pairs:
        for text in (en, bn):
            assert text == unicodedata.normalize("NFC", " ".join(text.split())), f"not NFC, or a stray space: {text!r}"
        assert re.fullmatch(r"[A-Za-z' ,]+[.?]", en) and re.fullmatch(r"[\u0980-\u09ff ,-]+[।?]", bn), (en, bn)
        assert bn[-1] == {".": "।", "?": "?"}[en[-1]] and not is_rare((en, bn), counts), (en, bn)


def main():
    parser = argparse.ArgumentParser(description="Write the English-Bengali demo corpus.")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path(__file__).with_name("demo.tsv"))
    parser.add_argument("--list", action="store_true", help="print each family with its count and an example instead")
    args = parser.parse_args()
    pairs, counts = build()
    check(pairs, counts)
    if args.list:
        for family in FAMILIES:
            mine = [pair for pair in pairs if pair[0] == family]
            print(f"{family} ({len(mine)}): {mine[0][1]} = {mine[0][2]}")
    else:
        args.out.write_text("".join(f"{en}\t{bn}\n" for _, en, bn in pairs), encoding="utf-8", newline="\n")
    print(f"{len(pairs)} pairs, {len(counts[0])} English and {len(counts[1])} Bengali words")


if __name__ == "__main__":
    main()
