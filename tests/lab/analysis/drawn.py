"""Maps of random numbers, and texts that would like to be more than text."""

from __future__ import annotations

import torch

from credit_trl import objective
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.lab.analysis.formula import PAPER, CreditFormula
from credit_trl.lab.analysis.responses import Response
from credit_trl.lab.analysis.tokenmap import TokenMap, TokenScores
from credit_trl.lab.analysis.tokentext import TokenText, visible

HOSTILE = (
    "<script>window.pwned = 1</script>",
    "</script><script>window.pwned = 2</script>",
    "</span></div></body></html><h1 id=pwned>pwned</h1>",
    '"><img src=x onerror="window.pwned = 3">',
    "' onmouseover='window.pwned = 4' x='",
    '<svg onload="window.pwned = 5"></svg><iframe src="javascript:window.pwned = 6"></iframe>',
    "<style>* { display: none }</style><link rel=stylesheet href=//localhost/x.css>",
    "${alert(1)} {{constructor.constructor('window.pwned = 7')()}} <!-- ]]> -->",
    "javascript:window.pwned = 8",
    "&lt;script&gt;window.pwned = 9&lt;/script&gt; &amp; &#x3c;b&#x3e;",
    "\u202eevil\u202c \u2066isolated\u2069 \u200b\ufeff\u2028\u2029 \x1b[31mred\x1b[0m \x00\x07",
    '\\u003cscript\\u003e window.pwned = 10 \\"); window.pwned = 11; //',
)


def drawn_map(
    tokens: list[str],
    *,
    seed: int = 0,
    identifier: str = "r0",
    checkpoint: str = "step-1",
    problem: str = "a problem",
    feedback: str | None = "the feedback",
    contrasts: int = 2,
    alternatives: list[str] | None = None,
    reward: float | None = 1.0,
    dtype: torch.dtype = torch.float32,
    coef: float = 0.1,
    formula: CreditFormula = PAPER,
) -> TokenMap:
    """A map of random log-probabilities over the given token texts."""
    generator = torch.Generator().manual_seed(seed)
    count, texts = len(tokens), alternatives or [" yes", " no", "↵\n"]

    def logps(*shape: int) -> torch.Tensor:
        return -8 * torch.rand(*shape, generator=generator, dtype=dtype).square()

    def advantages(student: torch.Tensor, teacher: torch.Tensor, contrast: torch.Tensor) -> torch.Tensor:
        if not contrasts:
            return objective.self_distillation_reward(teacher, student)
        options = {"form": formula.rule.form, "baseline": formula.baseline}
        return objective.credit_advantages(teacher, contrast, student, coef, **options)

    own = logps(count), logps(count), logps(contrasts, count)
    other = logps(count, len(texts)), logps(count, len(texts)), logps(contrasts, count, len(texts))
    entered = torch.full((count, 1 + len(texts)), coef if contrasts else 0.0, dtype=dtype)
    scores = TokenScores(
        *own,
        advantages(*own),
        entered[:, 0],
        coef,
        formula,
        torch.arange(len(texts)).expand(count, -1).contiguous(),
        *other,
        advantages(*other),
        entered[:, 1:],
    )
    others = tuple(f"another problem {k}" for k in range(contrasts))
    response = Response(identifier, problem, tuple(range(count)), PrivilegedContext(feedback=feedback), others, reward)
    shown = [TokenText(visible(text).replace("\n", "↵\n")) for text in tokens]
    return TokenMap(response, checkpoint, shown, ["other word"] * count, scores, [[visible(t) for t in texts]] * count)
