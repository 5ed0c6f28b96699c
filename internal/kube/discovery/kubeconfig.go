package discovery

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"

	"culvert.dev/internal/kube/client"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// parseKubeconfig makes a client's configuration from the kubeconfig of a Secret. The permission to
// write Secrets must not be enough to start programs here, to read files of this machine, or to
// impersonate an API server: what could do that is refused, in unused entries as well. Errors never
// quote the content.
func parseKubeconfig(data []byte) (*rest.Config, error) {
	cfg, err := clientcmd.Load(data)
	if err != nil {
		return nil, errors.New("it is not a kubeconfig")
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.AuthInfos)) {
		u := cfg.AuthInfos[name]
		switch {
		case u.Exec != nil:
			return nil, refuse("exec, which runs a program")
		case u.AuthProvider != nil:
			return nil, refuse("auth-provider, which may run a program")
		case u.TokenFile != "":
			return nil, refuse("tokenFile, a file of this machine; write token")
		case u.ClientCertificate != "":
			return nil, refuse("client-certificate, a file of this machine; write client-certificate-data")
		case u.ClientKey != "":
			return nil, refuse("client-key, a file of this machine; write client-key-data")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Clusters)) {
		c := cfg.Clusters[name]
		switch {
		case c.CertificateAuthority != "":
			return nil, refuse("certificate-authority, a file of this machine; write certificate-authority-data")
		case c.InsecureSkipTLSVerify:
			return nil, refuse("insecure-skip-tls-verify")
		}
		if u, err := url.Parse(c.Server); err != nil || u.Scheme != "https" || u.Host == "" {
			return nil, errors.New("its server is not an https:// URL")
		}
	}
	if cfg.CurrentContext == "" {
		return nil, errors.New("it has no current-context")
	}
	// A context that names a user or a cluster that is not there would be
	// completed with defaults.
	c, ok := cfg.Contexts[cfg.CurrentContext]
	if !ok {
		return nil, errors.New("its current-context is not among its contexts")
	}
	if cfg.Clusters[c.Cluster] == nil {
		return nil, errors.New("the cluster of its current-context is not among its clusters")
	}
	if cfg.AuthInfos[c.AuthInfo] == nil {
		return nil, errors.New("the user of its current-context is not among its users")
	}
	out, err := clientcmd.NewDefaultClientConfig(*cfg, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, errors.New("its current-context can't be used")
	}
	out.UserAgent, out.QPS, out.Burst = "culvert", client.QPS, client.Burst
	return out, nil
}

func refuse(what string) error { return fmt.Errorf("it has %s, and is refused", what) }
