// Package client has what every controller here needs of the Kubernetes API: where the API server
// is, whether it answers, what it forbids, and which of several replicas writes.
//
//	cfg, err := client.Config{Kubeconfig: path, Version: version}.REST()
//	pulse := client.NewPulse()
//	cfg.Wrap(pulse.Wrap)
//	core, err := kubernetes.NewForConfig(client.Protobuf(cfg))
//
// It reads no flags, and of the environment only what a pod is given: without a kubeconfig it uses
// the pod's service account.
package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"runtime"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// The limits on requests per second, and on bursts. client-go's own 5 and 10 make a controller look
// broken when a thousand routes need a status; the API server has priorities of its own to defend
// itself.
const (
	QPS   = 200
	Burst = 400
)

// A Config says where the API server is.
type Config struct {
	Kubeconfig string // a file; "" means that of the pod
	Context    string // of the file's; "" means the current one
	Version    string // of the program, for the user agent; "" means "dev"

	// Dial connects to the API server; nil means the dialer of client-go, whose connections
	// several clients share.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// REST returns the configuration of clients.
func (c Config) REST() (*rest.Config, error) {
	cfg, err := c.load()
	if err != nil {
		return nil, err
	}
	version := c.Version
	if version == "" {
		version = "dev"
	}
	cfg.UserAgent = fmt.Sprintf("culvert/%s (%s/%s)", version, runtime.GOOS, runtime.GOARCH)
	cfg.QPS, cfg.Burst, cfg.Dial = QPS, Burst, c.Dial
	return cfg, nil
}

func (c Config) load() (*rest.Config, error) {
	if c.Kubeconfig == "" {
		if c.Context != "" {
			return nil, fmt.Errorf("kubernetes: context %q without a kubeconfig", c.Context)
		}
		cfg, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("kubernetes: no kubeconfig, and not in a pod: KUBERNETES_SERVICE_HOST is not set")
		}
		if err != nil {
			return nil, fmt.Errorf("kubernetes: the pod's service account: %w", err)
		}
		return cfg, nil
	}
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: c.Kubeconfig}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: c.Context}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubernetes: kubeconfig %q, context %q: %w", c.Kubeconfig, c.Context, err)
	}
	if err := checkPlugin(cfg.ExecProvider); err != nil {
		return nil, fmt.Errorf("kubernetes: kubeconfig %q, context %q: %w", c.Kubeconfig, c.Context, err)
	}
	return cfg, nil
}

// checkPlugin returns an error where the program that gets credentials cannot run here, which
// each request would fail of otherwise. It is given no terminal.
func checkPlugin(p *api.ExecConfig) error {
	if p == nil {
		return nil
	}
	p.StdinUnavailable, p.StdinUnavailableMessage = true, "culvert gives plugins no terminal"
	if p.InteractiveMode == api.AlwaysExecInteractiveMode {
		return fmt.Errorf("the credential plugin %q has interactiveMode Always: it asks at a terminal, and a gateway has none; use a user with a plugin that does not ask", p.Command)
	}
	if _, err := exec.LookPath(p.Command); err != nil {
		if p.InstallHint != "" {
			return fmt.Errorf("the credential plugin: %w: install it where this user finds it: %s", err, p.InstallHint)
		}
		return fmt.Errorf("the credential plugin: %w: install it, or write its absolute path", err)
	}
	return nil
}

// Protobuf returns a copy of cfg for clients of built-in kinds, which take a third of the bytes so.
// Custom resources have no such encoding.
func Protobuf(cfg *rest.Config) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	cfg.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	return cfg
}
