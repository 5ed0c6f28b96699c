// Command controlplane is etcd, kube-apiserver and kube-controller-manager in
// one file; the first argument says which, the others are that program's own:
//
//	controlplane etcd --data-dir DIR ...
//	controlplane kube-apiserver --etcd-servers http://127.0.0.1:2379 ...
//	controlplane kube-controller-manager --kubeconfig FILE ...
//
// The two of Kubernetes share nearly all of their packages, so that one file is
// linked in the time, and has the size, of one of them. It is a module of its
// own because k8s.io/kubernetes needs its parts replaced by their published
// versions; replaces.sh writes that list.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

func main() {
	if len(os.Args) < 2 {
		usage()
	}
	program := os.Args[1]
	os.Args = append([]string{program}, os.Args[2:]...)
	switch program {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllermanager.NewControllerManagerCommand()))
	default:
		usage()
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: controlplane etcd|kube-apiserver|kube-controller-manager FLAGS...")
	os.Exit(2)
}
