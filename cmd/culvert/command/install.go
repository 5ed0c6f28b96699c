//go:build !nokube

package command

import (
	"io"

	"github.com/spf13/cobra"

	"culvert.dev/deploy"
)

type installOptions struct {
	dryRun   bool
	output   string
	settings deploy.Settings
}

func newInstall() *cobra.Command {
	var o installOptions
	cmd := &cobra.Command{
		Use:   "install --dry-run",
		Short: "Print the manifests that install culvert in Kubernetes",
		Long: `Install prints the manifests that the Helm chart makes for a profile: the
gateway, its permissions and its Service; with the profile "dns" a DNS server
too, with "gateway-api" a GatewayClass, with "authorization" the enforcement of
AuthorizationPolicies and their CRDs, with "daemonset" a gateway on the network
of each node, and with "out-of-cluster" the permissions alone. It does not write
to a cluster: kubectl applies what it prints.

All other settings are values of the chart: install it with Helm to change them.`,
		Example: `  culvert install --dry-run --create-namespace | kubectl apply --server-side -f -
  culvert install --dry-run --profile dns --cluster west
  culvert install --dry-run --image registry.example.com/culvert:v1.2.3 -o json`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install(cmd.OutOrStdout(), &o)
		},
	}
	f := cmd.Flags()
	s := &o.settings
	f.BoolVar(&o.dryRun, "dry-run", false, "required; nothing is applied to the cluster")
	f.StringVarP(&o.output, "output", "o", "yaml", "yaml or json")
	f.StringVar(&s.Profile, "profile", deploy.Profiles[0], "default, daemonset, dns, gateway-api, authorization or out-of-cluster")
	f.StringVar(&s.Name, "name", "culvert", "release name, the prefix of object names")
	f.StringVarP(&s.Namespace, "namespace", "n", "culvert-system", "target namespace")
	f.BoolVar(&s.CreateNamespace, "create-namespace", false, "also print the namespace, with the Pod Security labels it needs")
	f.StringVar(&s.Cluster, "cluster", "local", "id of the cluster, different in each")
	f.StringVar(&s.Image, "image", "", "container image (default: the chart's)")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"yaml", "json"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("profile", cobra.FixedCompletions(deploy.Profiles, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// install prints the manifests of o.
func install(w io.Writer, o *installOptions) error {
	if !o.dryRun {
		return usageError("culvert install --dry-run | kubectl apply --server-side -f -", "this program does not write to clusters: with --dry-run it prints manifests for kubectl apply")
	}
	write := deploy.WriteYAML
	switch o.output {
	case "yaml":
	case "json":
		write = deploy.WriteJSON
	default:
		return usageError("use yaml or json", "-o %q", o.output)
	}
	objects, err := deploy.Manifests(o.settings)
	if err != nil {
		return usageError("", "%w", err)
	}
	return write(w, objects)
}
