package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/connect"
	"culvert.dev/internal/kubeconfig"
	"culvert.dev/internal/unixsocket"
)

type kubeLoginOptions struct {
	credentialFiles
	cluster    string
	server     string // NAME[:PORT] by which the gateways have the API server
	agent      string
	gateway    string // HOST[:PORT], in place of agent
	user       string
	namespace  string
	kubeconfig string
	keep       bool
	replace    bool
}

func newKubeLogin() *cobra.Command {
	var o kubeLoginOptions
	cmd := &cobra.Command{
		Use:   "login CLUSTER",
		Short: "Have kubectl reach a cluster through the agent or a gateway",
		Long: `Login writes a cluster, a user and a context into the kubeconfig, all three with
the name CLUSTER, and makes the context the current one. kubectl then asks the
agent of this machine for the API server, by SOCKS5; TLS is between kubectl and
the API server.

With --gateway, kubectl dials a gateway itself, which finds the API server by the
name in the ClientHello and passes TLS on. That needs no agent, and a gateway that
lets callers in by that name without credentials of its own.

Everything else in the kubeconfig stays as it is, comments too. Of several files in
$KUBECONFIG, the first one that has an item by that name keeps it; new items and the
current context go to the first file that is there. A context or cluster of that name
that leads elsewhere is not replaced without --replace. What kubectl shows to the API
server is a certificate, a token, or the credentials of a user that the kubeconfig has
already. A user with a plugin (exec) stays as it is, and kubectl runs the plugin.`,
		Example: `  culvert kube login west --server kube.west.shop.example --ca cluster-ca.pem --cert me.pem --key me.key
  culvert kube login west --server kube.west.shop.example:6443 --user me
  culvert kube login west --server kube.west.shop.example --gateway gw.example --ca cluster-ca.pem --token-file token`,
		Args:              args(1, "one CLUSTER"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, a []string) error {
			o.cluster = a[0]
			if o.gateway != "" && cmd.Flags().Changed("agent") {
				return usageError("keep one of them", "--agent does not go with --gateway")
			}
			return runKubeLogin(cmd.Context(), cmd.OutOrStdout(), &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.server, "server", "", "`NAME[:PORT]` of the API server at the gateways (default: CLUSTER; default port: 443)")
	f.StringVar(&o.agent, "agent", defaultAgent, "where the agent is asked by SOCKS5: HOST:PORT")
	f.StringVar(&o.gateway, "gateway", "", "`HOST[:PORT]` of a gateway that passes TLS on by name, in place of the agent (default port: 443)")
	o.add(cmd, "the API server", "what the kubeconfig has, or the system's")
	f.StringVar(&o.user, "user", "", "user of the kubeconfig that has the credentials")
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace of the context")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "`FILE` to change, and no other (default: those of $KUBECONFIG, or ~/.kube/config)")
	f.BoolVar(&o.keep, "keep-current", false, "leave the current context as it is")
	f.BoolVar(&o.replace, "replace", false, "replace a context or cluster of that name which leads elsewhere, and other credentials of its user")
	cmd.MarkFlagsMutuallyExclusive("cert", "token-file", "user")
	for _, name := range []string{"server", "agent", "gateway", "user", "namespace"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
	return cmd
}

func newKubeTools() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "kube",
		Short:   "Set up kubectl to reach clusters through gateways",
		Example: "  culvert kube login west --server kube.west.shop.example --user me",
		Args:    subcommand,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newKubeLogin())
	return cmd
}

// entry returns what is written into the kubeconfig.
func (o *kubeLoginOptions) entry() (*kubeconfig.Entry, error) {
	if o.cluster == "" {
		return nil, usageError("write the name of a cluster", "CLUSTER is empty")
	}
	if o.server == "" {
		o.server = o.cluster
	}
	server, err := connect.ParseAuthority(withPort(o.server, "443"))
	if err != nil {
		return nil, usageError("write --server NAME[:PORT], as the gateways have it", "--server %q: %w", o.server, err)
	}
	if err := errors.Join(o.check(), o.readable()); err != nil {
		return nil, err
	}
	e := &kubeconfig.Entry{
		Name: o.cluster, Server: "https://" + server.String(), Namespace: o.namespace, Current: !o.keep, Replace: o.replace,
		User: o.user, CertFile: o.cert, KeyFile: o.key, CAFile: o.ca, TokenFile: o.token,
	}
	if o.gateway != "" {
		to, err := connect.ParseAuthority(withPort(o.gateway, "443"))
		switch {
		case err != nil:
			return nil, usageError("write HOST[:PORT]", "--gateway %q: %w", o.gateway, err)
		case server.Name.IsZero():
			return nil, usageError("write the name of the API server", "--server %q: a gateway finds it by its name, which an address is not", o.server)
		}
		e.Server, e.ServerName = "https://"+to.String(), server.Name.String()
	} else {
		if _, socket := unixsocket.Path(o.agent); socket {
			return nil, usageError("have the agent listen at a port of loopback, too", "--agent %q: kubectl asks no proxy at a Unix socket", o.agent)
		}
		if _, _, err := net.SplitHostPort(o.agent); err != nil {
			return nil, usageError("write HOST:PORT", "--agent %q: %w", o.agent, err)
		}
		e.ProxyURL = "socks5://" + o.agent
	}
	return e, nil
}

// paths returns the files of the kubeconfig, as kubectl chooses them.
func (o *kubeLoginOptions) paths() ([]string, error) {
	if o.kubeconfig != "" {
		return []string{o.kubeconfig}, nil
	}
	list := filepath.SplitList(os.Getenv("KUBECONFIG"))
	if list = slices.DeleteFunc(list, func(path string) bool { return path == "" }); len(list) > 0 {
		return list, nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return nil, usageError("give --kubeconfig FILE", "no home directory: %w", err)
	}
	return []string{filepath.Join(home, ".kube", "config")}, nil
}

// kubeconfigWait is how long others may hold the locks of the kubeconfig.
const kubeconfigWait = 3 * time.Second

// runKubeLogin changes the kubeconfig, and says what kubectl does by it.
func runKubeLogin(ctx context.Context, stdout io.Writer, o *kubeLoginOptions) error {
	e, err := o.entry()
	if err != nil {
		return err
	}
	paths, err := o.paths()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, kubeconfigWait)
	defer cancel()
	used, err := kubeconfig.Update(ctx, paths, e)
	if err != nil {
		out := &cliError{err: fmt.Errorf("change the kubeconfig: %w", err), code: exitFailed}
		var taken *kubeconfig.TakenError
		switch {
		case errors.As(err, &taken):
			out.hint = "add --replace to have it lead here, or give the cluster another name"
		case errors.Is(err, kubeconfig.ErrLocked):
			out.hint = "try again; if no kubectl runs, remove that file"
		}
		return out
	}
	how := "through the agent at " + o.agent
	if o.gateway != "" {
		how = "through a gateway, by the name " + e.ServerName
	}
	_, err = fmt.Fprintf(stdout, "%s: context %q leads to %s %s\n", strings.Join(used, ", "), e.Name, e.Server, how)
	return err
}
