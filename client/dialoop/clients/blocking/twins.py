"""The blocking twin of each client: the same methods, run on a background loop.

What mypy and editors know of them stands in twins.pyi, which infra/generate_blocking.py writes.
"""

from dialoop.clients.blocking.loop import twin_of
from dialoop.clients.environment import EnvironmentClient
from dialoop.clients.inference import InferenceClient
from dialoop.clients.recordings import RecordingClient
from dialoop.clients.replay import ReplayClient
from dialoop.clients.scorer import ScorerClient
from dialoop.clients.template import TemplateClient
from dialoop.clients.trainer import TrainerClient

BlockingEnvironmentClient = twin_of(EnvironmentClient)
BlockingInferenceClient = twin_of(InferenceClient)
BlockingRecordingClient = twin_of(RecordingClient)
BlockingReplayClient = twin_of(ReplayClient)
BlockingScorerClient = twin_of(ScorerClient)
BlockingTemplateClient = twin_of(TemplateClient)
BlockingTrainerClient = twin_of(TrainerClient)
