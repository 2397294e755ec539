#!/usr/bin/env bash
# machines.sh DIR PYTHON SHM: four "machines" of a network 10.77.0.0/24 on this one: 1 to 3, and 254, whose bridge is
# their switch. Each has its own network, processes, host name, /dev/shm, /tmp/ray and home (DIR/<number>), an sshd that
# lets DIR/key in, and a python3 that has what PYTHON has and can be installed into. Run it as the first process of
#     unshare --net --mount --pid --uts --fork --kill-child --mount-proc
# and all of it is gone once that is killed.
set -euo pipefail
dir=$1 python=$2 shm=$3

home() { # what it takes before anything is started
  mkdir -p "$1/.ssh" "$1/ray" "$1/tmp"
  cp "$dir/key.pub" "$1/.ssh/authorized_keys"
  "$python" -m venv --without-pip "$1/venv"
  "$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
    > "$("$1/venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
  for script in ray serve; do
    sed "1s|.*|#!$1/venv/bin/python3|" "$(dirname "$python")/$script" > "$1/venv/bin/$script"
    chmod +x "$1/venv/bin/$script"
  done
  # There is no package index in this network. `false` is pip's word for "yes" here.
  printf '[global]\nno-index = true\nno-build-isolation = false\n' > "$1/venv/pip.conf"
  # Temporary files stay at home, Ray's in /tmp/ray: the path of a socket has to be short.
  echo "export PATH=$1/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin TMPDIR=$1/tmp RAY_TMPDIR=/tmp" > "$1/.bashrc"
  awk -F: -v OFS=: -v home="$1" '$1 == "root" { $6 = home } 1' /etc/passwd > "$1/passwd"
  cat > "$1/sshd_config" << EOF
HostKey $dir/key
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
MaxSessions 64
MaxStartups 64
EOF
}

live() { # in namespaces of its own: the machine, from here to its end
  hostname "machine$(basename "$1")"
  mount -t tmpfs -o size="$shm" tmpfs /dev/shm
  mount -t tmpfs tmpfs /run
  mkdir /run/sshd
  mount --bind "$1/ray" /tmp/ray
  mount --bind "$1/passwd" /etc/passwd
  exec /usr/sbin/sshd -D -e -f "$1/sshd_config"
}

plug() { # in a network namespace of its own: a cable to the switch, of whose namespaces the first process is 1
  ip link set lo up
  ip link add eth0 type veth peer name "port$1" netns 1
  nsenter --target 1 --net ip link set "port$1" master switch up
  ip address add "10.77.0.$1/24" dev eth0
  ip link set eth0 up
  ip route add default via 10.77.0.254
  exec unshare --mount --pid --uts --fork --kill-child --mount-proc bash -ec "live '$dir/$1'"
}

export dir shm
export -f live plug
mkdir -p /tmp/ray
ssh-keygen -q -t ed25519 -N '' -f "$dir/key"
ip link set lo up
ip link add switch type bridge
ip address add 10.77.0.254/24 dev switch
ip link set switch up
for i in 1 2 3 254; do home "$dir/$i"; done
for i in 1 2 3; do unshare --net bash -ec "plug $i" & done
live "$dir/254"
