#!/usr/bin/env bash
# Make `docker compose up --build` work on a Debian machine that has no container engine and reaches no
# image registry: an engine of its own, and the two base images, from Debian's and Python's packages.
#
#   infra/docker/local_images.sh FOLDER
#   . FOLDER/env                            DOCKER_HOST and DOCKER_CONFIG for this shell
#   docker compose up --build
#   infra/docker/local_images.sh stop FOLDER        ends the daemon and removes the folder
#
# It needs root, a kernel with namespaces, mounts and bridges, and the packages as this machine's apt and
# pip get them. It adds no source to apt and leaves $HOME alone. The daemon listens on a socket in the
# folder and nowhere else. Where DOCKER_HOST is set no daemon is started, and the images are made there.
# A step whose result is there is not done again.
set -euo pipefail

action=start
if [ "${1:-}" = stop ]; then
  action=stop
  shift
fi
[ $# = 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$(realpath -m "$1")
release=bookworm      # its python3 is 3.11, as in python:3.11-slim
newer=trixie          # has compose 2 and buildx, which bookworm lacks
# Put into the base image where this machine's pip has a build of its own on the disk, as of torch for
# CPUs: a build inside an image reaches the package index alone.
wheels=${WHEELS:-torch==2.13.0}
pid_file=$folder/dockerd.pid
bridge=docker0

say() { printf '%s  %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() { printf '%s\n' "$*" >&2; exit 2; }

stop() {
  if [ -s "$pid_file" ]; then
    local pid
    pid=$(cat "$pid_file")
    if grep -qz dockerd "/proc/$pid/cmdline" 2>/dev/null; then
      kill "$pid"
      while [ -e "/proc/$pid" ]; do sleep 0.2; done
    fi
  fi
  if [ -e "$folder/made-bridge" ]; then rm -f "$folder/made-bridge" && ip link delete "$bridge" || true; fi
  # Only what this script put there.
  rm -rf "$folder"/{data,exec,config,build,apt,apt.log,debootstrap.log,dockerd.log,dockerd.pid,docker.sock,env}
  rmdir "$folder" 2>/dev/null || true
  say "Ended."
}

# apt's own user checks signatures, which a /dev/null that only root may write prevents.
apt_options=()
[ "$(stat -c %a /dev/null)" = 666 ] || apt_options=(-o APT::Sandbox::User=root)

install_engine() {
  local wanted=() pair had_policy=true
  for pair in dockerd:docker.io docker:docker.io debootstrap:debootstrap iptables:iptables ip:iproute2; do
    command -v "${pair%%:*}" >/dev/null || wanted+=("${pair##*:}")
  done
  [ "${#wanted[@]}" -gt 0 ] || return 0
  apt-get "${apt_options[@]}" update -qq
  # Releases after bookworm have the client in a package of its own.
  command -v docker >/dev/null || ! apt-cache show docker-cli >/dev/null 2>&1 || wanted+=(docker-cli)
  say "Installing ${wanted[*]}."
  # policy-rc.d answers 101, or the package would start a daemon of the whole machine.
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    had_policy=false
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
  fi
  DEBIAN_FRONTEND=noninteractive apt-get "${apt_options[@]}" install -qq --yes --no-install-recommends \
    "${wanted[@]}" >"$folder/apt.log" 2>&1 || { tail -20 "$folder/apt.log" >&2; exit 1; }
  $had_policy || rm -f /usr/sbin/policy-rc.d
}

# Programs of their own, which the client looks for in its folder.
get_plugins() {
  local plugins=$folder/config/cli-plugins apt=$folder/apt mirror package
  [ ! -x "$plugins/docker-compose" ] || return 0
  say "Getting compose 2 and buildx."
  mkdir -p "$plugins" "$apt"/{lists/partial,cache/archives/partial,sources,unpacked}
  mirror=$(apt-get indextargets 'Created-By: Packages' --format '$(REPO_URI)' | grep -m1 '/debian/\?$')
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "$mirror" "$newer" \
    /usr/share/keyrings/debian-archive-keyring.gpg >"$apt/sources/$newer.sources"
  : >"$apt/none.list"
  cat >"$apt/apt.conf" <<CONF
Dir::Etc::sourcelist "$apt/none.list";
Dir::Etc::sourceparts "$apt/sources";
Dir::State::lists "$apt/lists";
APT::Sandbox::User "root";
CONF
  (cd "$apt" && export APT_CONFIG=$apt/apt.conf && apt-get update -qq \
    && apt-get download -qq docker-compose docker-buildx)
  for package in "$apt"/*.deb; do dpkg-deb -x "$package" "$apt/unpacked"; done
  cp "$apt"/unpacked/usr/libexec/docker/cli-plugins/* "$plugins/"
  rm -r "$apt"
}

start_daemon() {
  local pid
  export DOCKER_HOST=unix://$folder/docker.sock
  docker version >/dev/null 2>&1 && return
  # Two daemons in one network namespace would take each other's packet filter rules away.
  for pid in $(pgrep -x dockerd || true); do
    [ "$(readlink "/proc/$pid/ns/net")" != "$(readlink /proc/self/ns/net)" ] \
      || fail "dockerd runs already (process $pid). Set DOCKER_HOST to use it, or end it."
  done
  say "Starting dockerd."
  ip link show "$bridge" >/dev/null 2>&1 || touch "$folder/made-bridge"
  setsid nohup dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$pid_file" \
    --host "$DOCKER_HOST" >"$folder/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 150); do
    docker version >/dev/null 2>&1 && break
    sleep 0.2
  done
}

has() { docker image inspect "$1" >/dev/null 2>&1; }

# What this machine's pip asks, by the name of the option; empty where nobody set it.
pip_option() { pip config list 2>/dev/null | sed -n "s/^[^=]*[.]$1='\(.*\)'$/\1/p" | head -1; }

make_debian() {
  local root=$folder/build/root index
  say "Making a small Debian $release with Python."
  rm -rf "$root" && mkdir -p "$root"
  debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates,netbase,tzdata \
    $release "$root" >"$folder/debootstrap.log" 2>&1 || { tail -20 "$folder/debootstrap.log" >&2; exit 1; }
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  # A build inside trusts whom this machine trusts, and asks the index that it asks.
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  index=$(pip_option index-url)
  {
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = /usr/local/share/wheels\n'
    printf 'timeout = 180\nroot-user-action = ignore\n'
    [ -z "$index" ] || printf 'index-url = %s\n' "$index"
  } >"$root/etc/pip.conf"
  tar -C "$root" -c . | docker import - local/debian:$release >/dev/null
  rm -rf "$root"
}

make_python() {
  local name build=$folder/build
  say "Making python:3.11-slim."
  mkdir -p "$build/wheels"
  for name in $wheels; do
    (cd "$build/wheels" && pip download -q --no-deps "$name" >/dev/null 2>&1) || true
  done
  find "$build/wheels" -type f ! -name '*+*' -delete # the index has its own builds
  docker build --quiet --tag python:3.11-slim --file - "$build" >/dev/null <<DOCKERFILE
FROM local/debian:$release
ENV LANG=C.UTF-8 PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
COPY wheels /usr/local/share/wheels
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED \\
 && python3 -m pip install -q --no-cache-dir --ignore-installed pip==24.0 setuptools==79.0.1 wheel==0.45.1 \\
 && ln -s /usr/bin/python3 /usr/local/bin/python
CMD ["python3"]
DOCKERFILE
  rm -rf "$build"
}

# Under the published image's user and folder, and without protected mode, as its redis-server is built.
make_redis() {
  say "Making redis:7.2 (the release's redis-server, which is 7.0)."
  docker build --quiet --tag redis:7.2 - >/dev/null <<DOCKERFILE
FROM local/debian:$release
RUN groupadd --system --gid 999 redis && useradd --system --uid 999 --gid 999 redis \\
 && apt-get update && apt-get install --yes --no-install-recommends redis-server \\
 && rm -rf /var/lib/apt/lists/* && install -d -o redis -g redis /data \\
 && printf '#!/bin/sh\\nexec /usr/bin/redis-server "\$@" --protected-mode no\\n' >/usr/local/bin/redis-server \\
 && chmod +x /usr/local/bin/redis-server
VOLUME /data
WORKDIR /data
EXPOSE 6379
CMD ["redis-server"]
DOCKERFILE
}

if [ $action = stop ]; then
  stop
  exit 0
fi
[ "$(id -u)" = 0 ] || fail "This needs root: a container engine mounts and makes networks."
mkdir -p "$folder"
install_engine
get_plugins
export DOCKER_CONFIG=$folder/config
[ -n "${DOCKER_HOST:-}" ] || start_daemon
docker version >/dev/null 2>&1 || { tail -20 "$folder/dockerd.log" >&2; fail "No daemon answers at $DOCKER_HOST."; }
printf 'export DOCKER_HOST=%s DOCKER_CONFIG=%s\n' "$DOCKER_HOST" "$DOCKER_CONFIG" >"$folder/env"
has local/debian:$release || make_debian
has python:3.11-slim || make_python
has redis:7.2 || make_redis
say "Ready: . $folder/env"
