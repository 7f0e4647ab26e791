"""Public datasets of spatial questions: VSR, Spatial-MM, What'sUp, and rotated pictures.

Each class says in its docstring how the files look; none of them is downloaded here. A sample has
`groups` (relation, task, perspective, ...) for the report, `group`, the most telling of them, and
`cluster`, its picture.
"""

from stageline.data.spatial.rotate import RotateCaption, RotateQA
from stageline.data.spatial.spatial_mm import SpatialMM
from stageline.data.spatial.vsr import VSR
from stageline.data.spatial.whats_up import WhatsUp

__all__ = ["VSR", "RotateCaption", "RotateQA", "SpatialMM", "WhatsUp"]
