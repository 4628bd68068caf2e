"""Text that tokenizers get wrong: 30 languages, code, emoji, control characters, marks, white space, and broken bytes.

The sentences are article 1 of the Universal Declaration of Human Rights, or the beginning of it.
"""

from __future__ import annotations

LANGUAGES: dict[str, str] = {
    "en": "All human beings are born free and equal in dignity and rights. They're endowed with reason and conscience.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren und sollen einander im Geiste begegnen.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits, l'un de l'autre ; « oui » !",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos. ¿Razón? ¡Conciencia!",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Perché? Così è.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren, zo'n één.",
    "sv": "Alla människor är födda fria och lika i värde och rättigheter.",
    "is": "Hver maður er borinn frjáls og jafn öðrum að virðingu og réttindum.",
    "fi": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.",
    "cs": "Všichni lidé se rodí svobodní a sobě rovní co do důstojnosti a práv.",
    "hu": "Minden emberi lény szabadon születik és egyenlő méltósága és joga van.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. İstanbul'da ığdır.",
    "vi": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.",
    "ru": "Все люди рождаются свободными и равными в своём достоинстве и правах.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах, з ґанку.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "hy": "Բոլոր մարդիկ ծնվում են ազատ ու հավասար իրենց արժանապատվությամբ ու իրավունքներով։",
    "ka": "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.",
    "he": "כל בני אדם נולדו בני חורין ושווים בערכם ובזכויותיהם. בְּרֵאשִׁית",
    "ar": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق، ١٢٣٤.",
    "fa": "تمام افراد بشر آزاد به دنیا می‌آیند و از لحاظ حیثیت و حقوق با هم برابرند؟",
    "ur": "تمام انسان آزاد اور حقوق و عزت کے اعتبار سے برابر پیدا ہوئے ہیں۔",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। १२३",
    "bn": "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে।",
    "ta": "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; அவர்கள் மதிப்பிலும் சமமானவர்கள்.",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ๑๒๓",
    "my": "လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့် လည်းကောင်း မွေးဖွားလာသူများ ဖြစ်သည်။",
    "am": "የሰው፡ልጅ፡ሁሉ፡ሲወለድ፡ነጻና፡በክብርና፡በመብትም፡እኩልነት፡ያለው፡ነው።",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。１２３",
    "zh-Hant": "人人生而自由，在尊嚴和權利上一律平等；𠮷野家、㐂、龘。",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。ｶﾀｶﾅ",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 한글",
    "sw": "Watu wote wamezaliwa huru, hadhi na haki zao ni sawa.",
    "yo": "Gbogbo ènìyàn ni a bí ní òmìnira; iyì àti ẹ̀tọ́ kọ̀ọ̀kan sì dọ́gba.",
}

CODE: list[str] = [
    "def f(x: int, *, y=None) -> str:\n    return f'{x!r:>10}' if y else \"\\n\"\n\n\nclass A(B):\n\tpass\n",
    "for (int i = 0; i < n; ++i) {\n\t\tx[i] += y->z * 0x1F; // TODO(a): it's\r\n\t}\r\n",
    '<html><body class="x">&amp;&#x27;</body></html><!-- a --><br/>',
    "SELECT * FROM t WHERE a='b' AND c IN (1,2,3);--drop",
    '{"a": [1, 2.5e-10, null, true], "b": {"c": "\\u00e9"}}',
    "https://example.org/a/b_c?d=e&f=%20#g user@example.com C:\\Users\\x",
    "camelCaseHTTPServer snake_case_name CONSTANT_NAME kebab-case iPhone15ProMax",
    "a=b;c==d;e!=f;g<=h;i>>=j;k&&l;m||n;!!o;p?q:r;s::t;u->v;w=>x;...;***;$$\\$",
    "```python\nprint(1)\n```\n| a | b |\n|---|---|\n- [x] **bold** _it_ ~~no~~\n1. one\n",
    "\\frac{a}{b}^{2} $\\sum_{i=0}^{n} x_i$ ∑∫√≤≥≠∞ α→β ⊕",
]

EMOJI: list[str] = [
    "🎉🚀😀 :-) ❤️ ❤ ☺️ ✅",
    "👨\u200d👩\u200d👧\u200d👦 👩🏽\u200d💻 🏳️\u200d🌈 🧑🏿\u200d🤝\u200d🧑🏻",
    "🇩🇪🇯🇵🇧🇷 🇩 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f 1️⃣ #️⃣",
]

CONTROL: list[str] = [
    "\x00\x01\x02\x03\x07\x08\x1b[31mred\x1b[0m\x7f",
    "\x85\x0b\x0c\x1c\x1d\x1e\x1f\x80\x9f",
    "\ufeffBOM \u200bzero\u200cwidth\u200d \u2060\u00ad\u200e\u200fmarks\u202e",
    "\ufffd replacement \ufffe\uffff\ufdd0 noncharacters \U0010ffff",
    "\ue000\uf8ff\U000f0000\U00100000 private",
]

MARKS: list[str] = [
    "e\u0301 é n\u0303 ñ A\u030a Å \u212b K \u212a ﬁ ﬀ ½ ² Ⅳ ㎏ ① ℌ",
    "Z̷̡͉a̴͎͝l̵̰̈g̶̢̛o̸̝͒ t̶e̵x̷t̸",
    "\u0301 leading mark \u0345\u0338 x\u0338 \u093f\u0e34",
    "ſ's 'ſ K's ǅ ǈ ß ẞ İ ı ŉ ÅNGSTRÖM Éa aÉ ÉA eÉÉe ΑΒγ ДОМдом",
    "don't DON'T Don'T we'll WE'LL I'd I'D they're you'Re 'tis ’s it’s",
    "“quoted” ‘single’ — dash – en … ellipsis • ¿? ¡! §¶ €£¥₹ ™®©",
]

SPACES: list[str] = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    " a",
    "  a",
    "a ",
    "a  ",
    "a  b   c    d     e",
    "\t\ttabs\t \t",
    "line\nline\n\n\nline\r\n\r\nline\rline",
    "   \n   \n \n\n  x\n ",
    "\u00a0nbsp\u3000wide\u2028line\u2029para\u1680\u2003em\u205f",
    " " * 70,
    "x" + " " * 33 + "y",
    "\n" * 40,
    "\t" * 19 + "x",
    "\u2581 \u2581\u2581x\u2581y",
]

NUMBERS: list[str] = [
    "0 1 12 123 1234 12345 1234567890 00001",
    "3.14159 1,000,000 1e-9 0xdeadBEEF 2026-11-29T17:08:22Z v1.2.3 $5.00 50%",
    "x1y22z333 a1b2 1st 2nd 100th ٣٤٥ ४५६ 𝟙𝟚𝟛 ½¾ ⅷ 一二三 ①②",
]

LONG: list[str] = [
    "a" * 300,
    "ab" * 150,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2,
    "0" * 100,
    "-" * 80 + "=" * 40 + "_" * 20 + "#" * 6,
    "吾輩は猫である名前はまだ無い" * 6,
    "abcdefghijklmnopqrstuvwxyz" * 6,
    "!?" * 60,
]

SPECIAL: list[str] = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|endoftext|> <s>a</s> <bos>b<eos> <unk> <pad>",
    "<|im_<|im_end|>end|> <|IM_END|> <|im_end |> <0x0A> <0xFF>",
    "[INST] x [/INST] <start_of_turn>user\nx<end_of_turn>\n<think>\n</think>",
]

TEXTS: list[str] = ["", *LANGUAGES.values(), *CODE, *EMOJI, *CONTROL, *MARKS, *SPACES, *NUMBERS, *LONG, *SPECIAL]

BROKEN: list[bytes] = [
    b"\xff\xfe",
    b"a\xe6\x97b",
    b"\xf0\x9f\x8e",
    b"\xc3\x28 \xa0\xa1 \xe2\x28\xa1",
    b"\xed\xa0\x80\xed\xb0\x80",
    b"\xf4\x90\x80\x80\xc0\x80",
    "🎉".encode()[1:] + b"x" + "é".encode()[:1],
]
"""Bytes that are not UTF-8: no text encodes to them, but a model's tokens can spell them."""
