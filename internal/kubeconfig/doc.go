// Package kubeconfig puts a cluster, a user and a context into a kubeconfig, and leaves
// everything else in it as it is, comments too.
//
//	used, err := kubeconfig.Update(ctx, []string{path}, &kubeconfig.Entry{
//		Name: "west", Server: "https://kube.west.example:443", ProxyURL: "socks5://127.0.0.1:1080",
//		CertFile: "/home/me/me.pem", KeyFile: "/home/me/me.key", Current: true,
//	})
//
// It follows kubectl's rules for several files, and needs nothing of Kubernetes' own packages, which are large.
package kubeconfig
