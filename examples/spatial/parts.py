"""Register the components of the study: `--import examples.spatial.parts`."""

from examples.spatial import metrics, rewards
from examples.spatial.scenes import Scenes
from examples.spatial.spatial_sets import VSR, RotateCaption, RotateQA, SpatialMM, WhatsUp
from register import dataset_register, metric_register, prompt_register, reward_register

prompt_register["vsr"] = (
    "[IMAGE]\nIs this statement about the picture true or false? [CAPTION]\nAnswer: [ANSWER]"
)
dataset_register["scenes"] = Scenes
dataset_register["vsr"] = VSR
dataset_register["spatial_mm"] = SpatialMM
dataset_register["whats_up"] = WhatsUp
dataset_register["rotate_qa"] = RotateQA
dataset_register["rotate_caption"] = RotateCaption
metric_register["vsr"] = metrics.vsr
metric_register["spatial_mm"] = metrics.spatial_mm
metric_register["whats_up"] = metrics.whats_up
metric_register["rotate_qa"] = metrics.rotate_qa
reward_register["spatial_consistency"] = rewards.spatial_consistency
reward_register.register("spatial_choice", rewards.spatial_choice, takes_lots=True)
