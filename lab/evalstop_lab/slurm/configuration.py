"""The files of a small Slurm: pure text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NODE = "gpunode"
CLUSTER = "evalstoptest"


@dataclass(frozen=True)
class Plan:
    """Where the daemons live and listen, and what the node has. `address`: what `hostname` resolves to."""

    folder: Path
    user: str
    hostname: str
    address: str
    controller_port: int
    node_port: int
    gpus: int
    kill_wait_seconds: int


def slurm_conf(plan: Plan) -> str:
    """slurm.conf: no control groups, no accounting, munge and JWT, jobs scheduled without delay."""
    folder = plan.folder
    # The daemons bind to what the hostname resolves to, which only a loopback address makes private.
    private = "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny\n" if plan.address.startswith("127.") else ""
    return f"""ClusterName={CLUSTER}
SlurmctldHost={plan.hostname}({plan.address})
SlurmUser={plan.user}
SlurmdUser={plan.user}
SlurmctldPort={plan.controller_port}
SlurmdPort={plan.node_port}
{private}AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
CredType=cred/munge
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={folder}/etc/jwt.key
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={plan.kill_wait_seconds}
MessageTimeout=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,requeue_delay=1
NodeName={NODE} NodeHostname={plan.hostname} NodeAddr={plan.address} CPUs=16 RealMemory=1000 \
  Gres=gpu:fake:{plan.gpus} State=UNKNOWN
PartitionName=gpu Nodes={NODE} Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes={NODE} MaxTime=INFINITE State=UP
"""


def gres_conf(devices: Sequence[Path]) -> str:
    """gres.conf: Slurm wants a character device for each GPU, and asks nothing else of it."""
    return "".join(f"NodeName={NODE} Name=gpu Type=fake File={device}\n" for device in devices)
