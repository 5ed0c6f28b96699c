package command

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"culvert.dev/deploy"
	"culvert.dev/registry/file"
)

type installOptions struct {
	dryRun    bool
	output    string
	release   deploy.Release
	values    []string
	set       []string
	valuesDoc bool
}

func newInstall() *cobra.Command {
	var o installOptions
	cmd := &cobra.Command{
		Use:   "install --dry-run",
		Short: "Print the manifests that install culvert in Kubernetes",
		Long: `Install prints the manifests of the Helm chart in this program: the gateway, its
permissions, its Service, and a DNS server if the values ask for one. It does
not write to a cluster: kubectl applies what it prints.

The values are the chart's, then those of each --values, then each --set. They
are validated by the chart's schema, and the resulting configuration is checked
as by "culvert config check".`,
		Example: `  culvert install --dry-run --create-namespace | kubectl apply --server-side -f -
  culvert install --dry-run --set gateway.kind=DaemonSet --set gateway.hostNetwork=true
  culvert install --dry-run --values values.yaml -o json
  culvert install --show-values`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install(cmd.OutOrStdout(), &o)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.dryRun, "dry-run", false, "required; nothing is applied to the cluster")
	f.StringVarP(&o.output, "output", "o", "yaml", "yaml or json")
	f.StringVar(&o.release.Name, "name", "culvert", "release name, the prefix of object names")
	f.StringVarP(&o.release.Namespace, "namespace", "n", "culvert-system", "target namespace")
	f.BoolVar(&o.release.CreateNamespace, "create-namespace", false, "also print the namespace, with the Pod Security labels it needs")
	f.StringArrayVar(&o.values, "values", nil, "file with values, YAML; repeatable, the last one wins")
	f.StringArrayVar(&o.set, "set", nil, `KEY.KEY=VALUE over the values, as in gateway.kind=DaemonSet; lists and maps in YAML; repeatable`)
	f.BoolVar(&o.valuesDoc, "show-values", false, "print the chart's values, with comments, instead of manifests")
	_ = cmd.MarkFlagFilename("values", "yaml", "yml")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"yaml", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// install prints the manifests of o.
func install(w io.Writer, o *installOptions) error {
	if o.valuesDoc {
		text, err := deploy.ValuesFile()
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	}
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
	values, err := o.merged()
	if err != nil {
		return err
	}
	objects, err := deploy.Render(o.release, values)
	if err != nil {
		return usageError(`"culvert install --show-values" lists all values there are`, "%w", err)
	}
	if err := checkInstalled(objects); err != nil {
		return err
	}
	return write(w, objects)
}

// merged are the chart's values and what the flags say of them.
func (o *installOptions) merged() (map[string]any, error) {
	values, err := deploy.Defaults()
	if err != nil {
		return nil, err
	}
	for _, name := range o.values {
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, usageError("", "--values: %w", noSuchFile(err))
		}
		over, err := deploy.ParseValues(data)
		if err != nil {
			return nil, usageError("", "%s: %w", name, err)
		}
		deploy.Merge(values, over)
	}
	for _, s := range o.set {
		if err := deploy.Set(values, s); err != nil {
			return nil, usageError("write --set gateway.kind=DaemonSet, or --set 'config.services=[]'", "--set %w", err)
		}
	}
	return values, nil
}

// checkInstalled finds mistakes in the configurations that would be installed.
func checkInstalled(objects []deploy.Object) error {
	for _, o := range objects {
		data, _ := o.Fields["data"].(map[string]any)
		for name, text := range data {
			if o.Kind != "ConfigMap" {
				continue
			}
			if _, err := file.Parse(fmt.Sprintf("ConfigMap %s, %s", o.Name, name), []byte(fmt.Sprint(text))); err != nil {
				return usageError("line numbers refer to the configuration that the values produce", "%w", err)
			}
		}
	}
	return nil
}
