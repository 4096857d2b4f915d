"""Evaluation of any model, converted or not."""

from linearize.evaluate.choice import Choice, choice
from linearize.evaluate.fidelity import fidelity
from linearize.evaluate.fidelity_result import Errors, Fidelity, KernelFidelity
from linearize.evaluate.harness import HarnessScore, HarnessTasks, harness, harness_tasks
from linearize.evaluate.perplexity import Perplexity, perplexity, sequence_nll
from linearize.evaluate.recall import RecallSplit, TokenClass, recall_split
from linearize.evaluate.tasks import Question, Task, get_task, read_questions

__all__ = [
    "Choice",
    "Errors",
    "Fidelity",
    "HarnessScore",
    "HarnessTasks",
    "KernelFidelity",
    "Perplexity",
    "Question",
    "RecallSplit",
    "Task",
    "TokenClass",
    "choice",
    "fidelity",
    "get_task",
    "harness",
    "harness_tasks",
    "perplexity",
    "read_questions",
    "recall_split",
    "sequence_nll",
]
