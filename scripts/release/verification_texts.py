"""The fixed texts on which an export is compared with the trained model."""

ENGLISH = (
    "The harbour was quiet before sunrise. A single boat, its engine barely audible, moved past "
    "the breakwater; two gulls followed it for a while and then gave up. By nine o'clock the "
    'market had opened, and somebody asked: "How much for three pounds of mackerel?" It cost '
    "$12.50, or about 11% more than it had in March 2019."
)
CHINESE = (
    "清晨的港口很安静。一条小船慢慢驶过防波堤,两只海鸥跟了一会儿就飞走了。九点钟,市场开门了,"
    "有人问:“三斤鲭鱼多少钱?”老板说十二块五毛,比二〇一九年三月贵了百分之十一。"
)
CODE = '''def moving_average(values: list[float], width: int = 3) -> list[float]:
    """Averages each window of `width` neighbours."""
    if width < 1:
        raise ValueError(f"width must be positive, not {width}")
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]


# >>> moving_average([1.0, 2.0, 6.0, 3.0])  ->  [3.0, 3.6666666666666665]
'''

TEXTS = {"english": ENGLISH, "chinese": CHINESE, "code": CODE}


def long_text(paragraphs: int) -> str:
    """Returns a text of many numbered paragraphs, of the three kinds in turn."""
    kinds = list(TEXTS.values())
    return "\n\n".join(f"{number}. {kinds[number % 3]}" for number in range(paragraphs))
