#!/usr/bin/env bash
# Builds kube-apiserver and kube-controller-manager from Debian 12's own source package, which carries all that it needs.
#
#   build.sh FOLDER     leaves FOLDER/bin; a second call finds it there and does nothing
#
# It takes 6 minutes of a quiet machine with two cores, and 4 GB of disk while it builds. No newer Kubernetes can be
# built from packages: from 1.32 on, Debian's source has kubectl alone. docs/limits.md says what that leaves unproved.
set -euo pipefail

folder=$(mkdir -p "$1" && cd "$1" && pwd)
programs=(kube-apiserver kube-controller-manager)
if [ -x "$folder/bin/${programs[0]}" ] && [ -x "$folder/bin/${programs[1]}" ]; then exit 0; fi

if [ "$(id -u)" -eq 0 ]; then
  missing=()
  for package in golang-1.19-go dpkg-dev make rsync; do
    dpkg-query --show --showformat '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  command -v etcd >/dev/null || missing+=(etcd-server)
  if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
fi

# Sources are asked for beside the machine's own lists, which stay as they are.
mirror=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep -m1 '/debian$' || true)
if [ -z "$mirror" ]; then echo "build.sh: apt knows of no mirror of Debian here" >&2; exit 1; fi
mkdir -p "$folder/work/lists/partial"
cd "$folder/work"
echo "deb-src $mirror bookworm main" > sources.list
apt=(apt-get -qq -o "Dir::Etc::SourceList=$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::Lists=$PWD/lists" -o APT::Sandbox::User=root)
"${apt[@]}" update
"${apt[@]}" source --download-only kubernetes
rm -rf source reflect2
dpkg-source --no-check -x kubernetes_*.dsc source >/dev/null

# The vendored reflect2 1.0.1 reads the insides of an older Go: with it, custom resources crash the server.
apt-get -qq -o APT::Sandbox::User=root download golang-github-modern-go-reflect2-dev
dpkg-deb -x golang-github-modern-go-reflect2-dev_*.deb reflect2
vendored=source/vendor/github.com/modern-go/reflect2
rm -f "$vendored"/*.go "$vendored"/*.s
cp reflect2/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$vendored"/
rm -f "$vendored"/*_test.go

export PATH=/usr/lib/go-1.19/bin:$PATH GOPATH=$PWD/source/.go HOME=$PWD CGO_ENABLED=0 GOFLAGS=-p=2
export GOCACHE=$PWD/go-cache GO111MODULE=off KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=clean
mkdir -p source/.go/src/k8s.io
ln -sfn ../../.. source/.go/src/k8s.io/kubernetes
make -C source/.go/src/k8s.io/kubernetes WHAT="$(printf 'cmd/%s ' "${programs[@]}")"
mkdir -p "$folder/bin"
for program in "${programs[@]}"; do
  install -m 755 "source/_output/bin/$program" "$folder/bin/$program"
done
cd "$folder" && rm -rf work
