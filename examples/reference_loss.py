"""The loss of CREDIT from whole logits, for reading and porting. A test compares it with `loss.credit_loss`."""

import torch
from torch import Tensor


def reference_loss(
    student: Tensor,
    teacher: Tensor,
    contrasts: Tensor,
    token_ids: Tensor,
    coef=0.1,
    topk=20,
    tail="bucket",
    alpha=1.0,
) -> tuple[Tensor, Tensor]:
    """Loss (N,) with the support "teacher_topk", and R_t (N,) at the sampled tokens.

    student, teacher: (N, V) logits divided by the temperature; contrasts: (C, N, V); token_ids: (N,).
    """
    log_p, f, g = (logits.log_softmax(-1) for logits in (student, teacher, contrasts))
    advantages = (f - coef * g.mean(0) - log_p).gather(-1, token_ids[:, None]).squeeze(-1)  # Eq. 8
    support = f.topk(topk).indices  # (N, K)

    def buckets(logps: Tensor) -> Tensor:
        support_logps = logps.gather(-1, support.expand(*logps.shape[:-1], topk))
        if tail == "renormalize":
            return support_logps.log_softmax(-1)
        outside = (1 - support_logps.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()
        return torch.cat([support_logps, outside], -1)

    log_p, f, g = buckets(log_p), buckets(f), buckets(g)
    target = (f - coef * g.mean(0)).detach()  # a = f − λ Ĝ, the mean of logs bucket by bucket
    log_q = target.log_softmax(-1)
    if alpha == 1.0:  # reverse KL; unnormalised with a tail bucket, which changes the value and not the gradient
        loss = (log_p.exp() * (log_p - (log_q if tail == "renormalize" else target))).sum(-1)
    elif alpha == 0.0:  # forward KL
        loss = (log_q.exp() * (log_q - log_p)).sum(-1)
    else:
        log_m = ((1 - alpha) * log_p.exp() + alpha * log_q.exp()).log()
        to_student = (log_p.exp() * (log_p - log_m)).sum(-1)
        loss = (1 - alpha) * to_student + alpha * (log_q.exp() * (log_q - log_m)).sum(-1)
    return loss, advantages.detach()
