"""`service`: prints what keeps a site or the coordinator running: a hardened systemd unit, or a recipe for Windows."""

import ntpath
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from federation.errors import ConfigurationError, WhoActs
from parley.terminal import HomeOption, home

__all__ = ["Service", "coordinator_service", "site_service", "unit", "windows"]

UserOption = Annotated[str, typer.Option(help="The user that runs it; it owns the home and may read the data.")]
WindowsOption = Annotated[bool, typer.Option("--windows", help="Print a recipe for Windows instead.")]
PythonOption = Annotated[
    str, typer.Option(help="Path of the Python in which Parley is installed [default: this one].", show_default=False)
]


@dataclass(frozen=True, slots=True)
class Service:
    """What is to be kept running.

    Args:
        name: The service's name.
        description: What it is, for people.
        arguments: Those of `parley`, without the home.
        home: Folder of the machine's Parley files.
        user: Who runs it.
        python: Path of the Python in which Parley is installed.
    """

    name: str
    description: str
    arguments: tuple[str, ...]
    home: str
    user: str
    python: str

    def __post_init__(self) -> None:
        """Refuses what would change the meaning of a unit or a script."""
        for value in (self.home, self.user, self.python, *self.arguments):
            if not value or any(character in value for character in "\n\r\"'`$%"):
                raise ConfigurationError(
                    f"a service cannot be made of {value!r}: it is empty, or has a quote, $, % or a line break in it",
                    fix="choose another folder or user name",
                    who=WhoActs.YOU,
                )


def site_service(
    user: UserOption = "parley", windows_: WindowsOption = False, python: PythonOption = "", home_: HomeOption = None
) -> None:
    """Prints what keeps this site attending: a systemd unit, or with --windows a recipe for Windows."""
    service = Service(
        "parley-site",
        "Parley site: trains on this institution's own data",
        ("site", "run"),
        _absolute(home_),
        user,
        python or sys.executable,
    )
    print(windows(service) if windows_ else unit(service, trains=True))


def coordinator_service(
    user: UserOption = "parley",
    windows_: WindowsOption = False,
    python: PythonOption = "",
    health_port: Annotated[int, typer.Option(help="Port of the health probe, on 127.0.0.1 only; 0: none.")] = 8081,
    home_: HomeOption = None,
) -> None:
    """Prints what keeps the coordinator serving: a systemd unit, or with --windows a recipe for Windows."""
    arguments = ("coordinator", "serve", *(("--health-port", str(health_port)) if health_port else ()))
    service = Service(
        "parley-coordinator",
        "Parley coordinator: runs the consortium's rounds",
        arguments,
        _absolute(home_),
        user,
        python or sys.executable,
    )
    print(windows(service) if windows_ else unit(service, trains=False))


def _absolute(given: Path | None) -> str:
    return str(home(given).folder.expanduser().absolute())


# ------------------------------------------------------------------------------------------------------------- systemd


_UNIT = """\
# /etc/systemd/system/{name}.service
# Install:  sudo useradd --system --create-home --shell /usr/sbin/nologin {user}    (unless there is such a user)
#           sudo chown -R {user}: {home}
#           sudo systemctl daemon-reload && sudo systemctl enable --now {name}
# Look:     systemctl status {name};  journalctl -u {name} -f;  sudo -u {user} {doctor}

[Unit]
Description={description}
Wants=network-online.target
After=network-online.target time-sync.target
StartLimitIntervalSec=0

[Service]
Type=exec
User={user}
ExecStart={command}
{environment}
# It comes back after every end, however often: what was under way is taken up again.
Restart=always
RestartSec=5
TimeoutStopSec=30
KillMode=mixed

# It may write its home and nothing else, gain no privilege, and see no other user's files or devices.
ReadWritePaths={quoted_home}
UMask=0077
NoNewPrivileges=true
ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=true
{devices}
ProtectProc=invisible
ProtectClock=true
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectControlGroups=true
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
LockPersonality=true
CapabilityBoundingSet=
SystemCallArchitectures=native
SystemCallFilter=@system-service
{limits}
[Install]
WantedBy=multi-user.target"""

_PROXY = """\
# Behind a proxy: put its URL into {home}/site/proxy.txt (mode 0600), or uncomment:
# Environment=HTTPS_PROXY=http://proxy.example.org:3128"""


_EXPENDABLE = """
# When memory runs out, it goes before the machine's other work.
OOMScoreAdjust=500
"""


def unit(service: Service, *, trains: bool) -> str:
    """The text of a systemd unit. A service that trains may use accelerators, and yields memory before others do."""
    command = (service.python, "-P", "-m", "parley", *service.arguments, "--home", service.home)
    doctor = (service.python, "-P", "-m", "parley", "doctor", "--home", service.home)
    in_home = any(Path(path).is_relative_to(top) for path in (service.home, service.python) for top in _HOMES)
    return _UNIT.format(
        name=service.name,
        user=service.user,
        home=shlex.quote(service.home),
        quoted_home=f'"{service.home}"',
        description=service.description,
        command=" ".join(f'"{word}"' if " " in word else word for word in command),
        doctor=shlex.join(doctor),
        environment=_PROXY.format(home=service.home) if trains else "",
        protect_home="read-only" if in_home else "true",
        devices="# Accelerators are devices, so they stay visible; without one: PrivateDevices=true"
        if trains
        else "PrivateDevices=true",
        limits=_EXPENDABLE if trains else "",
    )


_HOMES = ("/home", "/root", "/run/user")
"""What ProtectHome=true would hide."""

# ------------------------------------------------------------------------------------------------------------- Windows

_WINDOWS = """\
# {name}: keeps "{shown}" running on Windows. Run this in an elevated PowerShell.
#
# What this is, and what it is not: Parley is a console program. It does not answer the Service Control Manager, so a
# service made of it with New-Service or `sc.exe create` is ended 30 s after its start (error 1053). Windows itself
# brings what is needed without another program: a task of the Task Scheduler that starts with the machine, runs
# without anybody logged in, and is started again within a minute of its end. It shows in taskschd.msc, not in
# services.msc, and is ended without a word when Windows shuts down: what was under way is taken up again.
# A true service needs a wrapper of your choice that the Service Control Manager can talk to; give it the same command.

$ErrorActionPreference = 'Stop'
$python = '{python}'   # where Parley is installed
$home_  = '{home}'   # its files
$log    = Join-Path $home_ '{name}.log'

# 1. Who runs it: a built-in account without a password, with few rights but those given here. It cannot reach file
#    shares: for data on one, use a group managed service account (-UserId 'DOMAIN\\parley$' -LogonType Password).
$user = 'NT AUTHORITY\\LOCAL SERVICE'
New-Item -ItemType Directory -Force $home_ | Out-Null
icacls $home_ /inheritance:r /grant 'Administrators:(OI)(CI)F' "${{user}}:(OI)(CI)M" | Out-Null
#    It must be able to read the data sets as well:   icacls D:\\data\\heart.csv /grant "${{user}}:R"

# 2. The task. cmd.exe keeps the log. The second trigger starts it every minute, which does nothing while it runs:
#    the scheduler's own restart does not look at how a program ended.
$command   = '/c ""{{0}}" -P -m parley {arguments} --home "{{1}}" >> "{{2}}" 2>&1"' -f $python, $home_, $log
$action    = New-ScheduledTaskAction -Execute 'cmd.exe' -Argument $command -WorkingDirectory $home_
$triggers  = (New-ScheduledTaskTrigger -AtStartup),
             (New-ScheduledTaskTrigger -Once -At (Get-Date) -RepetitionInterval (New-TimeSpan -Minutes 1))
$principal = New-ScheduledTaskPrincipal -UserId $user -LogonType ServiceAccount -RunLevel Limited
$settings  = New-ScheduledTaskSettingsSet -MultipleInstances IgnoreNew -ExecutionTimeLimit ([TimeSpan]::Zero) `
    -AllowStartIfOnBatteries -DontStopIfGoingOnBatteries -StartWhenAvailable
Register-ScheduledTask -TaskName '{name}' -Description '{description}' -Action $action -Trigger $triggers `
    -Principal $principal -Settings $settings -Force | Out-Null
Start-ScheduledTask -TaskName '{name}'

# Look:  Get-ScheduledTaskInfo {name};  Get-Content $log -Tail 50 -Wait
#        & $python -P -m parley doctor --home $home_
# End:   Stop-ScheduledTask {name};  Unregister-ScheduledTask {name}
# The log grows without end: empty it when the task is stopped."""


def windows(service: Service) -> str:
    """A PowerShell script that makes a scheduled task, with what it can and cannot do in its comments."""
    return _WINDOWS.format(
        name=service.name,
        shown=" ".join(("parley", *service.arguments)),
        python=_on_windows(service.python, r"C:\Program Files\Parley\Scripts\python.exe"),
        home=_on_windows(service.home, r"C:\ProgramData\parley"),
        arguments=" ".join(service.arguments),
        description=service.description,
    )


def _on_windows(path: str, usual: str) -> str:
    """The path, or the usual one when this is another kind of machine and the recipe is for one elsewhere."""
    return path if ntpath.splitdrive(path)[0] else usual
