// From assemblies to viral contigs: nextflow run main.nf --input 'assemblies/*.fa.gz'

include { VIRNUC_PREDICT } from './modules/nf-core/virnuc/predict/main'

workflow {
    assemblies = channel
        .fromPath(params.input, checkIfExists: true)
        .map { fasta -> tuple([id: fasta.simpleName], fasta) }

    VIRNUC_PREDICT(assemblies)

    channel.topic('versions')
        .unique()
        .map { process, tool, version -> "${process}:\n    ${tool}: ${version}" }
        .collectFile(name: 'versions.yml', storeDir: params.outdir, newLine: true)
}
