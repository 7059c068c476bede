# SPDX-License-Identifier: Apache-2.0
"""Provides readers of the papers' data sets, from local files to tensors, and tokenizers of texts."""

from torch_privacy.data.adult import load_adult as load_adult
from torch_privacy.data.cifar import PublicImages as PublicImages
from torch_privacy.data.cifar import load_cifar10 as load_cifar10
from torch_privacy.data.cifar import load_labeled_public_images as load_labeled_public_images
from torch_privacy.data.cifar import load_public_images as load_public_images
from torch_privacy.data.dataset import Data as Data
from torch_privacy.data.dataset import random_split as random_split
from torch_privacy.data.files import DataError as DataError
from torch_privacy.data.imdb import TrainingWords as TrainingWords
from torch_privacy.data.imdb import load_imdb as load_imdb
from torch_privacy.data.mnist import load_mnist as load_mnist
from torch_privacy.data.movielens import load_movielens as load_movielens
from torch_privacy.data.svhn import load_svhn as load_svhn
from torch_privacy.data.text import HashedWords as HashedWords
from torch_privacy.data.text import Vocabulary as Vocabulary
from torch_privacy.data.text import encode as encode
from torch_privacy.data.text import tokenize as tokenize
